"""Run Gymnasium's tests of vector envs on `envserve.make_vec`.

    python scripts/gymnasium_tests.py --source DIR [--tcp] [ARGUMENTS of pytest]

DIR is a checkout of the installed release of Gymnasium. `envserve.make_vec` replaces
`AsyncVectorEnv` and, in tests/wrappers/vector, also `SyncVectorEnv`; only tests that
use a replaced class are counted. gymnasium_tests.txt lists the expected failures, with
reasons. The exit code is 1 if any other test fails, or if a listed test passes.
The tests of RecordVideo need moviepy. On a host without OpenGL, add `-k "not Ant-v4"`,
which excludes the tests that render with OpenGL.

With --tcp, the envs run on a server. Servers do not accept functions, so the workers
import this file as an env module, which unpickles the functions of the tests.
"""

import argparse
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from envserve.python_process import main_command, python_command

HERE = Path(__file__).resolve().parent
SELF = Path(__file__).stem
ENV = "envserve/Pickled-v0"
#: Python code that runs this file as a script.
RUN = f"import runpy; runpy.run_module({SELF!r}, run_name='__main__', alter_sys=True)"
#: Maps folders of tests to the classes that `envserve.make_vec` replaces in them.
PARTS = {
    "tests/vector": ("AsyncVectorEnv",),
    "tests/wrappers/vector": ("AsyncVectorEnv", "SyncVectorEnv"),
}
MAX_EXPECTED = 4

_count = itertools.count()


def make_pickled(path: str) -> gymnasium.Env[Any, Any]:
    """Create the env of the next row; the worker creates its envs in row order."""
    functions = pickle.loads(Path(path).read_bytes())
    env: gymnasium.Env[Any, Any] = functions[next(_count) % len(functions)]()
    return env


gymnasium.register(ENV, f"{SELF}:make_pickled")


def expected_failures() -> dict[str, str]:
    """Return a dict from the id of each test that may fail to the reason."""
    lines = (HERE / f"{SELF}.txt").read_text().splitlines()
    entries = [line.partition("  # ") for line in lines if line and line[0] != "#"]
    return {name.strip(): reason for name, _, reason in entries}


class Harness:
    """A pytest plugin that replaces Gymnasium's classes with `envserve.make_vec`."""

    def __init__(self) -> None:
        self.users: set[str] = set()  # ids of tests that use a replaced class
        self.outcomes: dict[str, str] = {}
        self.test = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        expected = expected_failures()
        for item in items:
            if item.nodeid in expected:
                reason = expected[item.nodeid]
                strict = "may pass" not in reason
                item.add_marker(pytest.mark.xfail(reason=reason, strict=strict))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for part in PARTS:
            users = [test for test in sorted(self.users) if test.startswith(part)]
            passed = [test for test in users if self.outcomes.get(test) == "passed"]
            terminalreporter.write_line(
                f"{part}: {len(users)} tests use envserve, {len(passed)} pass"
            )

    def substitute(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for Gymnasium's classes that calls `make`.

        It records the tests that use it in `users`.
        """

        def make_vec(*arguments: Any, **options: Any) -> Any:
            self.users.add(self.test)
            return make(*arguments, **options)

        return make_vec


def start_server() -> str:
    """Start a server whose workers can create the envs; return its address."""
    options = ["--allow-kwarg", "path:any", "--import", SELF]
    for name in ("gravity", "set:gravity", "max_count", "set:max_count"):
        options += ["--expose", name]
    # A single worker creates the envs in row order.
    options += ["--workers", "1", "--insecure-no-auth", "--bind", "tcp://127.0.0.1:0"]
    command = main_command(
        "envserve.__main__", "start", ENV, *options, ends_with_parent=True
    )
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"tcp://\S+", line):
            return found[0]
    raise RuntimeError("expected a server address; the server has exited")


def run_part(part: str, over_tcp: bool, arguments: Sequence[str]) -> int:
    """Run one folder of tests in this process; return pytest's exit code."""
    import cloudpickle  # type: ignore[import-untyped]
    import pytest

    import envserve

    address = start_server() if over_tcp else ""
    folder = tempfile.TemporaryDirectory()

    def make_remote(env_fns: Sequence[Any], **options: Any) -> Any:
        path = Path(folder.name, f"{next(_count)}.pickle")
        path.write_bytes(cloudpickle.dumps(list(env_fns)))
        return envserve.make_vec(
            ENV,
            len(env_fns),
            [address],
            options,
            env_kwargs={"path": str(path)},
            insecure=True,
        )

    harness = Harness()
    make_vec: Any = harness.substitute(make_remote if over_tcp else envserve.make_vec)
    for name in PARTS[part]:
        setattr(gymnasium.vector, name, make_vec)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-rfEX"]
    return int(pytest.main([part, *options, *arguments], plugins=[harness]))


def main() -> int:
    """Run each folder in a separate process; return the exit code."""
    if sys.argv[1:2] == ["--part"]:
        return run_part(sys.argv[2], sys.argv[3] == "--tcp", sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the checkout")
    parser.add_argument("--tcp", action="store_true", help="run the envs on a server")
    options, arguments = parser.parse_known_args()
    if sum("tests/vector" in name for name in expected_failures()) > MAX_EXPECTED:
        parser.error(f"{SELF}.txt: expected at most {MAX_EXPECTED} tests/vector tests")
    source = options.source.resolve()
    path = [str(HERE), str(HERE.parent), str(source), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    lane = "--tcp" if options.tcp else "--local"
    codes = [
        subprocess.run(
            python_command(RUN, "--part", part, lane, *arguments),
            cwd=source,
            env=environ,
        ).returncode
        for part in PARTS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
