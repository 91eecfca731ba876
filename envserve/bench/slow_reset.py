"""`bench slow-reset`: what slow resets cost with warm spare envs, and without."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Final

import numpy as np
import typer

from envserve.bench import envs
from envserve.bench.case_process import Case, Measure
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import SPEED, Load, summary
from envserve.bench.options import (
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    announcer,
    as_range,
    as_ratio,
    options_of,
)
from envserve.bench.ours import our_batch
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish

__all__ = ["slow_reset"]

_FAST: Final = "quick resets"


def slow_reset(
    context: typer.Context,
    num_envs: NumEnvs = 32,
    step_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="What a step sleeps.")
    ] = 1.0,
    reset_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="What a reset sleeps.")
    ] = 200.0,
    episode_length: Annotated[int, typer.Option(min=1, help="Steps.")] = 200,
    episodes: Annotated[
        int, typer.Option(min=1, help="Episodes of a measurement.")
    ] = 3,
    staggered: Annotated[
        bool, typer.Option(help="Let episodes end at different times in each env.")
    ] = False,
    repetitions: Repetitions = 3,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure stepping with slow resets, with and without spare envs."""
    env = {
        "step_seconds": step_milliseconds / 1e3,
        "reset_seconds": reset_milliseconds / 1e3,
        "episode_length": episode_length,
        "is_staggered": staggered,
    }
    slow = Load("envserve/Sleep-v0", num_envs, num_envs, 0, env, (envs.MODULE,))
    quick = replace(slow, env_kwargs={**env, "reset_seconds": 0.0})
    steps = {
        "num_steps": episodes * episode_length,
        # The first episodes of a row are short ones, that of its spare env too.
        "first_steps": 2 * episode_length if staggered else 0,
    }
    spare = {"options": {"spare_envs": True}}
    cases = [
        Case(_FAST, episodes_of, {"load": quick, **steps}),
        Case("slow resets, spare envs", episodes_of, {"load": slow, **steps, **spare}),
        Case("slow resets", episodes_of, {"load": slow, **steps}),
    ]
    outcome = take_turns(chosen(cases, only or []), repetitions, announcer())
    report = Report(
        name="slow-reset",
        title=f"{num_envs} envs, a step sleeps {step_milliseconds:g} ms, every "
        f"{episode_length} steps a reset sleeps {reset_milliseconds:g} ms"
        f"{', at different times in each env' if staggered else ''}: "
        "env steps per second",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "steps/s", "lowest - highest", "p50 us", "p99 us"]
        + [f"/ {_FAST}"],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            "A worker per env, in-process. Whole episodes of each env per "
            f"measurement: {episodes}."
        ],
        plot=Plot(
            "env steps per second",
            outcome.all_values(SPEED),
        ),
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def episodes_of(
    load: Load,
    num_steps: int,
    first_steps: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Measure]:
    """Makes so many batch steps per measurement, and some when it is opened."""
    actions = np.zeros(load.num_envs, np.int64)
    with our_batch(load, (), **options) as batch:
        for _ in range(first_steps):
            batch.step(actions)

        def measure() -> Mapping[str, float]:
            clock = time.perf_counter
            instants = [clock()]
            for _ in range(num_steps):
                batch.step(actions)
                instants.append(clock())
            return summary(np.diff(instants), load.num_envs)

        yield measure


def _row(outcome: Outcome, case: str) -> list[str]:
    return [
        case,
        f"{outcome.median(case, SPEED):,.0f}",
        as_range(outcome.values(case, SPEED)),
        f"{outcome.median(case, 'p50_us'):,.0f}",
        f"{outcome.median(case, 'p99_us'):,.0f}",
        as_ratio(outcome.ratio(case, _FAST, SPEED)),
    ]
