"""Fixtures and hooks for all tests: random seeds, isolation and leak checks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from envserve.python_process import uncollected_imports
from tests.leak_checks import MARK_NAME, MARK_VALUE
from tests.leak_checks import nothing_left_behind as nothing_left_behind

ROOT = Path(__file__).resolve().parent.parent
#: The slowest test files, which run first, so that no worker of pytest-xdist is still
#: busy when all others have finished.
LONGEST = (
    *("test_elastic", "test_learners", "test_cli_run", "test_hostile_servers"),
    *("test_simulation", "test_cases", "test_working_directory", "test_update"),
    *("test_lane_faults", "test_sequences", "test_diagnosis", "test_vector_env"),
    *("test_imports", "test_update_spaces", "test_scores", "test_commands"),
    *("test_iteration_by_hand", "test_cli", "test_train", "test_env_context"),
    *("test_remote_lane_interrupts", "test_server_keys", "test_server_sessions"),
    *("test_remote_lane", "test_page", "test_evaluate", "test_command_line"),
    *("test_server_restarts", "test_checkpoint", "test_send_recv", "test_export"),
    *("test_kill_and_resume", "test_three_commands", "test_determinism"),
    *("test_interrupts", "test_visualize", "test_hostile_runs", "test_launcher"),
    *("test_custom_networks", "test_overlap", "test_trust_region", "test_objective"),
    *("test_pool_interrupts", "test_vector_blocks", "test_lane_contract", "test_sac"),
    *("test_act_on", "test_simulate_splits", "test_predecessor_faults", "test_metrics"),
)

# Hypothesis examples have no deadline, because machines may be slow and shared. They
# are the same in every run, so that the result does not depend on chance.
hypothesis.settings.register_profile(
    "envserve", deadline=None, print_blob=True, derandomize=True
)
hypothesis.settings.load_profile("envserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-seed",
        type=int,
        default=0,
        help="seed of every test's random numbers; other seeds than 0 find new cases",
    )


def pytest_configure() -> None:
    os.environ[MARK_NAME] = MARK_VALUE
    # Processes that the tests start inherit ignored signals: a shell ignores SIGINT in
    # background jobs, and nohup ignores SIGHUP.
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, default)
    # Cache bytecode, even if the user disables that: most tests start processes, and
    # each of them would compile the packages again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Servers and other child processes import `tests` too, from any working directory.
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    # Keep the repro files of intentional crashes out of the user's folder.
    root = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = os.path.join(root, f"envserve-suite-{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # Keep keys out of the user's folder too; all servers and clients share this folder.
    os.environ["ENVSERVE_HOME"] = os.path.join(folder, "home")
    # Keep caches out of it as well; `tests.ppo.runs` enables that of XLA.
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    os.environ["TF_XLA_FLAGS"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what is imported from garbage collection, which it would make slow."""
    with uncollected_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: {config.getoption('random_seed')}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """Keep the files with an xdist worker's captured output, in case it aborts."""
    node.captured = []
    for path in Path(f"/proc/{node.gateway._rinfo().pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if str(path.readlink()).endswith(" (deleted)"):
                node.captured.append(path.open("rb"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    for file in node.captured:
        with file:
            if error and (text := file.read().decode(errors="replace")):
                node.config.get_terminal_writer().line(f"\nIts last output:\n{text}")


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
    """Return this test's seed, derived from its name and --random-seed."""
    session_seed = request.config.getoption("random_seed")
    return zlib.crc32(f"{session_seed} {request.node.name}".encode())


@pytest.fixture
def random_generator(random_seed: int) -> np.random.Generator:
    return np.random.default_rng(random_seed)


@pytest.fixture(autouse=True)
def seeded_global_randomness(random_seed: int) -> None:
    """Seed the global random generators, which some envs and libraries use."""
    random.seed(random_seed)
    np.random.seed(random_seed)


@pytest.fixture
def flushed_inodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of `os.fsync` appends the inode."""
    inodes: list[int] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        inodes.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    return inodes
