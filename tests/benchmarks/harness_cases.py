"""Cases of tests of the benchmarks, which open them in other processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from envserve.bench.interleaved import Measure


@contextlib.contextmanager
def counting(name: str, log: Path) -> Iterator[Measure]:
    """Yield a measurement of 1, 2, 3, ..., and log every call and the end."""
    count = 0

    def write(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def measure() -> Mapping[str, float]:
        nonlocal count
        count += 1
        write(name)
        return {"value": float(count), "pid": float(os.getpid())}

    yield measure
    write(f"end of {name}")


@contextlib.contextmanager
def raising(error: Exception) -> Iterator[Measure]:
    raise error
    yield


@contextlib.contextmanager
def dying() -> Iterator[Measure]:
    yield lambda: os._exit(7)


def process_of(*_: object) -> int:
    """Return the process of a run, instead of its score."""
    return os.getpid()
