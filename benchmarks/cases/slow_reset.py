"""`slow-reset`: the cost of slow resets, with and without spare envs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks.cases import envs
from benchmarks.command import NumEnvs, Repetitions, Run, sub_command
from benchmarks.harness import Case
from benchmarks.result import median, ratio, spread
from envserve.bench.cases import batch_env
from envserve.bench.interleaved import SPEED, Measure, summary, time_each
from envserve.bench.workload import Workload

_FAST: Final = "quick resets"


@sub_command
def slow_reset(
    run: Run,
    num_envs: NumEnvs = 32,
    step_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="Duration of a step.")
    ] = 1.0,
    reset_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="Duration of a reset.")
    ] = 200.0,
    episode_length: Annotated[
        int, typer.Option(min=1, help="Steps per episode.")
    ] = 200,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes per measurement.")] = 3,
    staggered: Annotated[
        bool, typer.Option(help="End the episodes of the envs at different steps.")
    ] = False,
    repetitions: Repetitions = 3,
) -> None:
    """Measure stepping with slow resets, with and without spare envs."""
    env = {
        "step_seconds": step_milliseconds / 1e3,
        "reset_seconds": reset_milliseconds / 1e3,
        "episode_length": episode_length,
        "is_staggered": staggered,
    }
    slow = Workload("envserve/Sleep-v0", num_envs, num_envs, 0, env, (envs.MODULE,))
    fast = replace(slow, env_kwargs={**env, "reset_seconds": 0.0})
    steps = {
        "num_steps": episodes * episode_length,
        # The first episodes of each env and of its spare env are shorter: exclude both.
        "first_steps": 2 * episode_length if staggered else 0,
    }
    spare = {"spare_envs": True}
    cases = [
        Case(_FAST, episodes_of, {"load": fast, **steps}),
        Case("slow resets, spare envs", episodes_of, {"load": slow, **steps, **spare}),
        Case("slow resets", episodes_of, {"load": slow, **steps}),
    ]
    run.publish(
        title=f"{num_envs} envs, a step sleeps {step_milliseconds:g} ms, every "
        f"{episode_length} steps a reset sleeps {reset_milliseconds:g} ms"
        f"{', at different times in each env' if staggered else ''}: "
        "env steps per second",
        measured=run.measure(cases, repetitions),
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "p50 us": median("p50_us"),
            "p99 us": median("p99_us"),
            f"/ {_FAST}": ratio(_FAST, SPEED),
        },
        notes=[
            "One worker per env, in-process. Complete episodes of each env per "
            f"measurement: {episodes}."
        ],
    )


@contextlib.contextmanager
def episodes_of(
    load: Workload, num_steps: int, first_steps: int, spare_envs: bool = False
) -> Iterator[Measure]:
    """Measure `num_steps` batch steps at a time; do not measure the first ones.

    `first_steps` is the number of batch steps before the first measurement.
    """
    actions = np.zeros(load.num_envs, np.int64)
    with batch_env(load, spare_envs=spare_envs) as batch:
        time_each(batch.step, [actions] * first_steps)
        all_actions = [actions] * num_steps
        yield lambda: summary(time_each(batch.step, all_actions), load.num_envs)
