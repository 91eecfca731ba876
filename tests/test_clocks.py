"""Code that measures time or waits uses a monotonic clock, because wall clocks jump."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("benchmarks", "envserve", "ppo", "scripts"),
    *("tests/chaos", "tests/simulation"),
)

#: Functions that read the wall clock, by module; some only if called without a time.
WALL_CLOCKS = {
    "time": {
        *("time", "time_ns", "ctime", "localtime", "gmtime", "strftime", "asctime"),
        *("clock_gettime", "clock_gettime_ns"),
    },
    "datetime": {"now", "utcnow", "today"},
}

#: Functions that put the time of day into names and records, but never wait for it.
STAMPS = {
    "benchmarks/result.py:as_json: datetime.now",
    "benchmarks/result.py:publish: datetime.now",
    "benchmarks/suite.py:suite: datetime.now",
    "tests/chaos/cli.py:chaos: datetime.now",
    "tests/chaos/case_tables.py:_save: datetime.now",
    "ppo/cli/run_setup.py:create_folder: time.strftime",
    "ppo/run_folder/metrics.py:truncate_events: time.time",
    "envserve/keys/key_folder.py:write_key: datetime.now",
    "envserve/server/audit.py:write: datetime.now",
}

#: Functions that check the dates on which keys and invitations expire.
DATES = {
    "envserve/server/access.py:__init__: time.time",
    "envserve/cli/doctor.py:_keys: time.time",
    "envserve/cli/clients.py:clients: time.time",
    "envserve/cli/invite.py:invite: time.time",
    "envserve/cli/keys.py:make: time.time",
}


def readings(source: str) -> Iterator[str]:
    """Yield "function: module.name" for all names that may read the wall clock."""
    for function, node in nodes_by_function(ast.parse(source), ""):
        if isinstance(node, ast.ImportFrom) and node.module in WALL_CLOCKS:
            for alias in node.names:
                if alias.name in WALL_CLOCKS[node.module]:
                    yield f"{function}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in WALL_CLOCKS and alias.asname not in (None, alias.name):
                    yield f"{function}: {alias.name} as {alias.asname}"
        elif isinstance(node, ast.Attribute):
            module = ast.unparse(node.value).split(".")[-1]
            module = "datetime" if module == "date" else module
            if node.attr in WALL_CLOCKS.get(module, ()):
                yield f"{function}: {module}.{node.attr}"


def nodes_by_function(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = child.name if is_function else function  # type: ignore[attr-defined]
        yield inner, child
        yield from nodes_by_function(child, inner)


def test_only_stamps_and_dates_read_the_wall_clock() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{reading}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for reading in readings(path.read_text())
    }
    assert found == STAMPS | DATES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ndef f(): return time.time()", "f: time.time"),
        ("from time import time_ns", ": time.time_ns"),
        ("clock = time.time", ": time.time"),
        ("import time as clock", ": time as clock"),
        ("import datetime\nasync def g(): datetime.datetime.now()", "g: datetime.now"),
        ("datetime.utcnow()", ": datetime.utcnow"),
        ("datetime.date.today()", ": datetime.today"),
        ("time.monotonic(), time.perf_counter(), queue.time, loop.time()", None),
        ("from time import monotonic, sleep", None),
    ],
)
def test_readings_of_the_wall_clock_are_found(
    source: str, expected: str | None
) -> None:
    assert list(readings(source)) == ([expected] if expected else [])
