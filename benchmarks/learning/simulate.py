"""`simulate`: a rollout, compared with stepping the envs alone."""

from typing import Annotated

import typer

from benchmarks.cases.ours import stepping_in_place
from benchmarks.command import (
    CORES,
    EnvName,
    NumEnvs,
    Repetitions,
    Run,
    Seconds,
    Workers,
    sub_command,
)
from benchmarks.harness import Case
from benchmarks.learning.rollouts import RolloutLoad, choosing, simulating
from benchmarks.result import median, ratio, spread
from envserve.bench.interleaved import MICROSECONDS
from envserve.bench.workload import Workload

STEP = "BatchEnv.step alone"
SIMULATE = "simulate()"
_POLICY = "policy alone, in NumPy"
_IN_TENSORFLOW = "simulate(), policy in TensorFlow"


@sub_command
def simulate(
    run: Run,
    env: EnvName = "CartPole-v1",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    horizon: Annotated[int, typer.Option(min=1, help="Batch steps per rollout.")] = 128,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 5,
) -> None:
    """Compare a rollout with stepping the envs alone."""
    load = Workload(env, num_envs, workers, seconds)
    work = {"work": RolloutLoad(load, horizon)}
    load.check()
    cases = [
        Case(STEP, stepping_in_place, {"load": load}),
        Case(_POLICY, choosing, work),
        Case(SIMULATE, simulating, work),
        Case(_IN_TENSORFLOW, simulating, {**work, "in_numpy": False}),
    ]
    run.publish(
        title=f"{env}, {num_envs} envs, {workers} workers: us per batch step",
        measured=run.measure(cases, repetitions),
        columns={
            "us per batch step": median(MICROSECONDS),
            "lowest - highest": spread(MICROSECONDS),
            f"/ {STEP}": ratio(STEP, MICROSECONDS),
        },
        notes=[
            f"{STEP} gets actions chosen in advance. The networks are the default ones."
        ],
    )
