"""`scale`: the time per env step and the memory as the batch grows."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Final

import typer

from benchmarks.cases.peers import import_peer
from benchmarks.command import (
    CORES,
    EnvName,
    Repetitions,
    Run,
    Seconds,
    Workers,
    sub_command,
)
from benchmarks.harness import Case, measure_cases
from benchmarks.result import median, spread
from envserve.bench.cases import batch_env, stepping_batch_env
from envserve.bench.interleaved import SPEED, Measure, Measurements, make_measure
from envserve.bench.workload import Workload

_MEMORY: Final = "proportional_set_bytes"
_SIZES: Final = [4, 16, 64, 256, 1024]


@sub_command
def scale(
    run: Run,
    env: EnvName = "CartPole-v1",
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of envs; can be repeated.")
    ] = None,
    workers: Workers = CORES,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 3,
) -> None:
    """Measure time per env step and memory as the batch grows, in-process."""
    sizes = sorted(set(size or _SIZES))
    loads = {f"{n} envs": Workload(env, n, min(workers, n), seconds) for n in sizes}
    cases = [
        Case(name, stepping_batch_env, {"load": load}) for name, load in loads.items()
    ]
    loads[f"{sizes[0]} envs"].check()
    measured = run.measure_all(cases, repetitions)
    base = f"{workers} envs"
    loads[base] = Workload(env, workers, workers, seconds)
    memory = {name: _measure_memory(name, load) for name, load in loads.items()}

    def beyond_base(_: Measurements, case: str) -> str:
        total, least = memory[case], memory[base]
        return _in_megabytes(None if total is None or least is None else total - least)

    run.publish(
        title=f"{env}, {workers} workers: time per env step, and memory",
        measured=measured,
        columns={
            "us per env step": median(_microseconds, ".2f"),
            "lowest - highest": spread(_microseconds, ".2f"),
            "steps/s": median(SPEED),
            "p50 us": median("p50_us"),
            "p99 us": median("p99_us"),
            f"MB beyond {base}": beyond_base,
        },
        notes=[
            "MB (1e6 bytes): proportional set size of the stepping process and its "
            "descendants, in new processes for each number of envs, minus the "
            f"{_in_megabytes(memory[base])} MB with one env per worker ({base}), which "
            "are mostly imports."
        ],
        results={_MEMORY: memory, "base": base},
    )


@contextlib.contextmanager
def memory_of(load: Workload) -> Iterator[Measure]:
    """Step a batch, then measure the memory of this process and its descendants."""
    processes = import_peer("benchmarks.support.processes")
    with batch_env(load) as batch:
        make_measure(batch.step, load.actions(), load)()

        def measure() -> Mapping[str, float]:
            pids = processes.with_descendants(os.getpid())
            return {_MEMORY: float(processes.proportional_set_bytes(pids))}

        yield measure


def _measure_memory(name: str, load: Workload) -> float | None:
    """Return the memory in bytes, or None if the system does not report it."""
    if sys.platform != "linux":
        return None
    # Measure each case alone. Otherwise, its processes would share memory pages with
    # those of other cases, which would decrease their proportional set sizes.
    case = Case(name, memory_of, {"load": replace(load, seconds=0.1)})
    return measure_cases([case], 1).median(name, _MEMORY)


def _microseconds(numbers: Mapping[str, float]) -> float:
    return 1e6 / numbers[SPEED]


def _in_megabytes(number: float | None) -> str:
    return "-" if number is None else f"{round(number / 1e6):,}"
