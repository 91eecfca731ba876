"""Run Gymnasium's tests of vector envs on envserve's vector env.

    python scripts/gymnasium_tests.py --source DIR [ARGUMENTS of pytest]

DIR is a checkout of the installed release. In tests/vector, envserve's class replaces
`AsyncVectorEnv`, and only tests that use it count; in tests/wrappers/vector it replaces
`SyncVectorEnv` too. gymnasium_tests.txt lists the expected failures, with reasons. The
exit code is 1 if any other test fails, or if one of these passes.
RecordVideo needs moviepy; without OpenGL, `-k "not Ant-v4"` excludes the tests that
render with it.

The tests pass functions that create envs, so this file is also an env module for
workers: its env is created by a function that this process has pickled.
"""

import argparse
import atexit
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from envserve.python_process import python_command

HERE = Path(__file__).resolve().parent
SELF = Path(__file__).stem
ENV = "envserve/Pickled-v0"
#: Python code that runs this file as a script.
RUN = f"import runpy; runpy.run_module({SELF!r}, run_name='__main__', alter_sys=True)"
#: The classes that envserve's class replaces, by folder of tests.
PARTS = {
    "tests/vector": ("AsyncVectorEnv",),
    "tests/wrappers/vector": ("AsyncVectorEnv", "SyncVectorEnv"),
}
MAX_EXPECTED = 15
#: Modules of the tests that workers need; the template imports them once.
PRELOADED = ("tests.testing_env", "tests.vector.testing_utils")

_count = itertools.count()


def make_pickled(path: str) -> gymnasium.Env[Any, Any]:
    """Create the next env of a worker, which creates its envs in row order."""
    functions = pickle.loads(Path(path).read_bytes())
    env: gymnasium.Env[Any, Any] = functions[next(_count) % len(functions)]()
    return env


gymnasium.register(ENV, f"{SELF}:make_pickled")


def expected_failures() -> dict[str, str]:
    """Return the reasons of expected failures, by test id."""
    lines = (HERE / f"{SELF}.txt").read_text().splitlines()
    entries = [line.partition("  # ") for line in lines if line and line[0] != "#"]
    return {name.strip(): reason for name, _, reason in entries}


class Harness:
    """A pytest plugin that replaces Gymnasium's classes with envserve's."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.test = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        expected = expected_failures()
        for item in items:
            if item.nodeid in expected:
                reason = expected[item.nodeid]
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for part in PARTS:
            of_part = [n for n in sorted(self.users) if n.startswith(part)]
            passed = [n for n in of_part if self.outcomes.get(n) == "passed"]
            terminalreporter.write_line(
                f"{part}: {len(of_part)} tests use envserve's class, {len(passed)} pass"
            )

    def substitute(self) -> Callable[..., Any]:
        """Return a replacement for `AsyncVectorEnv` that also takes `env_fns`."""
        import cloudpickle  # type: ignore[import-untyped]

        from envserve.client import BatchEnv
        from envserve.client.vector_env import AUTORESET_MODES, VectorEnv
        from envserve.pool.launcher import Launcher
        from envserve.pool.pool import Pool
        from envserve.settings import PoolSettings

        launcher = Launcher([SELF, *PRELOADED])
        atexit.register(launcher.close)
        folder = tempfile.TemporaryDirectory()
        users, harness = self.users, self

        class FunctionsVectorEnv(VectorEnv):
            def __init__(
                self,
                env_fns: Sequence[Callable[[], Any]],
                shared_memory: bool = True,
                copy: bool = True,
                autoreset_mode: Any = AutoresetMode.NEXT_STEP,
                observation_mode: object = "same",  # the only supported mode
            ) -> None:
                users.add(harness.test)
                path = Path(folder.name, f"{next(_count)}.pickle")
                path.write_bytes(cloudpickle.dumps(list(env_fns)))
                mode = AutoresetMode(autoreset_mode)
                settings = PoolSettings(
                    env_name=ENV,
                    num_envs=len(env_fns),
                    num_workers=1,
                    env_kwargs={"path": str(path)},
                    autoreset=next(k for k, v in AUTORESET_MODES.items() if v is mode),
                    infos="all",
                    nonfinite="pass",
                    seed=0,
                    seeded=False,
                )
                pool = Pool(settings, launcher=launcher)
                pool.finish_start(time.monotonic() + 60)
                batch = BatchEnv(
                    [pool], autoreset=settings.autoreset, padding_after=1e9
                )
                super().__init__(batch, copy=copy)

        return FunctionsVectorEnv


def run_part(part: str, arguments: Sequence[str]) -> int:
    """Run one folder of tests in this process; return pytest's exit code."""
    import pytest

    harness = Harness()
    ours: Any = harness.substitute()
    for name in PARTS[part]:
        setattr(gymnasium.vector, name, ours)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-rfEX"]
    return int(pytest.main([part, *options, *arguments], plugins=[harness]))


def main() -> int:
    """Run each folder in a separate process; return the exit code."""
    if sys.argv[1:2] == ["--part"]:
        return run_part(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the checkout")
    given, arguments = parser.parse_known_args()
    if sum("tests/vector" in name for name in expected_failures()) > MAX_EXPECTED:
        parser.error(f"more than {MAX_EXPECTED} of tests/vector may fail")
    source = given.source.resolve()
    path = [str(HERE), str(HERE.parent), str(source), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    codes = [
        subprocess.run(
            python_command(RUN, "--part", part, *arguments),
            cwd=source,
            env=environ,
        ).returncode
        for part in PARTS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
