"""Cases for tests of the benchmark's harness; opened in processes of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from envserve.bench.interleaved import Measure


@contextlib.contextmanager
def counting(name: str, log: Path) -> Iterator[Measure]:
    """Measures 1, 2, 3, ...; writes down every measurement, and its end."""
    count = 0

    def measure() -> Mapping[str, float]:
        nonlocal count
        count += 1
        write(log, name)
        return {"value": float(count)}

    yield measure
    write(log, f"end of {name}")


@contextlib.contextmanager
def telling_its_pid() -> Iterator[Measure]:
    yield lambda: {"pid": float(os.getpid())}


@contextlib.contextmanager
def raising(error: Exception) -> Iterator[Measure]:
    raise error
    yield


@contextlib.contextmanager
def failing_to_measure() -> Iterator[Measure]:
    yield lambda: {"value": 1 / 0}


@contextlib.contextmanager
def dying() -> Iterator[Measure]:
    yield lambda: os._exit(7)


def write(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")
