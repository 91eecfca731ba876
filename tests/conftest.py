"""What holds for every test: a seed that a failure prints, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.left_behind import MARK_NAME, MARK_VALUE
from tests.left_behind import nothing_left_behind as nothing_left_behind

ROOT = Path(__file__).resolve().parent.parent
#: What takes longest begins first: no process of the suite works on alone at its end.
LONGEST = (
    *("test_cli_run", "test_learners", "test_elastic", "test_simulation"),
    *("test_cases", "test_update", "test_train", "test_sequences", "test_evaluate"),
    *("test_commands", "test_checkpoint", "test_cli", "test_lane_faults"),
    *("test_determinism", "test_update_spaces", "test_kill_and_resume", "test_export"),
    *("test_three_commands", "test_server_sessions", "test_server_restarts"),
)

# The examples of a slow, shared machine are as valid as those of a fast one. Whether a
# change passes does not depend on luck: every run has the same examples and seeds.
hypothesis.settings.register_profile(
    "envserve", deadline=None, print_blob=True, derandomize=True
)
hypothesis.settings.load_profile("envserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-seed",
        type=int,
        default=0,
        help="seed of every test's random numbers; others than 0 explore",
    )


def pytest_configure() -> None:
    os.environ[MARK_NAME] = MARK_VALUE
    # Servers and other processes of a test import `tests` too, wherever they run.
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    # Repro files of crashes made on purpose stay out of the user's folder.
    root = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = os.path.join(root, f"envserve-suite-{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # And so do keys: all servers and clients of the suite are one user's.
    os.environ["ENVSERVE_HOME"] = os.path.join(folder, "home")
    # Nor does what a test compiles go into the user's cache folder, or come from it.
    os.environ["TF_XLA_FLAGS"] = "--tf_xla_persistent_cache_directory="


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: {config.getoption('random_seed')}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """Holds on to what pytest captures in a process: one that aborts says why there."""
    node.captured = []
    for path in Path(f"/proc/{node.gateway._rinfo().pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(path.readlink()).endswith(" (deleted)"):
                node.captured.append(path.open("rb"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    for file in node.captured:
        with file:
            if error and (said := file.read().decode(errors="replace")):
                node.config.get_terminal_writer().line(f"\nIts last words:\n{said}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        seed = item.config.getoption("random_seed")
        report.sections.append(("random seed", f"--random-seed {seed}"))
    return report


@pytest.fixture
def random_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test: another for each test, the same however it is selected."""
    session_seed = request.config.getoption("random_seed")
    return zlib.crc32(f"{session_seed} {request.node.name}".encode())


@pytest.fixture
def random_generator(random_seed: int) -> np.random.Generator:
    return np.random.default_rng(random_seed)


@pytest.fixture(autouse=True)
def seeded_global_randomness(random_seed: int) -> None:
    """Covers envs and libraries that draw from the global generators."""
    random.seed(random_seed)
    np.random.seed(random_seed)
