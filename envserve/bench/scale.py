"""`bench scale`: what an env step costs, and what memory, as the batch grows."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Final

import typer

from envserve.bench.case_process import Case, Measure
from envserve.bench.harness import Outcome, take_turns
from envserve.bench.load import SPEED, Load, check_env, stepping
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    OutDir,
    Repetitions,
    Seconds,
    Workers,
    announcer,
    as_range,
    options_of,
)
from envserve.bench.ours import our_batch, our_stepping
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from envserve.lab.processes import proportional_set_bytes, with_descendants

__all__ = ["scale"]

_MEMORY: Final = "proportional_set_bytes"
_SIZES: Final = [4, 16, 64, 256, 1024]


def scale(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "CartPole-v1",
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of envs; repeatable.")
    ] = None,
    workers: Workers = CORES,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 3,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure time per env step and memory of ever more envs, in-process."""
    sizes = sorted(set(size or _SIZES))
    first = Load(env, min(sizes), min(workers, min(sizes)), seconds)
    loads = {
        f"{n} envs": replace(first, num_envs=n, workers=min(workers, n)) for n in sizes
    }
    cases = [
        Case(name, our_stepping, {"load": load, "binds": ()})
        for name, load in loads.items()
    ]
    check_env(env)
    outcome = take_turns(cases, repetitions, announcer())
    base = f"{workers} envs"
    loads[base] = replace(first, num_envs=workers, workers=workers)
    memory = {name: _memory_alone(name, load) for name, load in loads.items()}
    report = Report(
        name="scale",
        title=f"{env}, {workers} workers: time per env step, and memory",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "us per env step", "lowest - highest", "steps/s", "p50 us"]
        + ["p99 us", f"MB beyond {base}"],
        rows=[_row(outcome, case, memory, base) for case in outcome.measured],
        notes=[
            "MB (1e6 bytes) of proportional set size of the process that steps and "
            "all that it has started, each size measured alone in fresh processes, "
            f"beyond that with one env per worker ({base}), which stands for what "
            f"the imports alone take: {_megabytes(memory[base])}."
        ],
        plot=Plot(
            "us per env step",
            {case: _microseconds(outcome, case) for case in outcome.measured},
            ("envs", sizes),
        ),
        results={
            "us_per_env_step": {
                c: _microseconds(outcome, c) for c in loads if c in outcome.measured
            },
            "proportional_set_bytes": memory,
            "base": base,
        },
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def memory_of(load: Load) -> Iterator[Measure]:
    """Steps a little, and looks at all processes."""
    with our_batch(load, ()) as batch:
        stepping(batch.step, load.actions(), load)()

        def measure() -> Mapping[str, float]:
            pids = with_descendants(os.getpid())
            return {_MEMORY: float(proportional_set_bytes(pids))}

        yield measure


def _memory_alone(name: str, load: Load) -> float | None:
    """Returns bytes, or None where they cannot be had."""
    if sys.platform != "linux":
        return None
    # Alone: the pages of other cases' processes would be shared with these.
    case = Case(name, memory_of, {"load": replace(load, seconds=0.1)})
    return take_turns([case], 1).median(name, _MEMORY)


def _microseconds(outcome: Outcome, case: str) -> list[float]:
    return [1e6 / speed for speed in outcome.values(case, SPEED)]


def _megabytes(number: float | None) -> str:
    return "-" if number is None else f"{round(number / 1e6):,}"


def _row(
    outcome: Outcome, case: str, memory: Mapping[str, float | None], base: str
) -> list[str]:
    taken, without = memory[case], memory[base]
    beyond = None if taken is None or without is None else taken - without
    return [
        case,
        f"{1e6 / outcome.median(case, SPEED):.2f}",
        as_range(_microseconds(outcome, case), ".2f"),
        f"{outcome.median(case, SPEED):,.0f}",
        f"{outcome.median(case, 'p50_us'):,.0f}",
        f"{outcome.median(case, 'p99_us'):,.0f}",
        _megabytes(beyond),
    ]
