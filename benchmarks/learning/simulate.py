"""`simulate`: a rollout in one graph call, compared with a loop in Python."""

import statistics
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
from benchmarks.learning.rollouts import (
    RolloutLoad,
    choosing,
    looping_in_python,
    simulating,
)
from benchmarks.result import median, spread
from envserve.bench.interleaved import MICROSECONDS, Measurements
from envserve.bench.workload import Workload

_LANE = "BatchEnv.step alone"
_POLICY = "policy alone, in a graph"
_SIMULATE = "simulate()"
_LOOP = "Python loop, policy as tf.function"
_XLA_LOOP = "Python loop, policy compiled by XLA"


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
    """Compare a rollout in one graph call with loops in Python."""
    load = Workload(env, num_envs, workers, seconds)
    work = {"work": RolloutLoad(load, horizon)}
    load.check()
    cases = [
        Case(_LANE, stepping_in_place, {"load": load}),
        Case(_POLICY, choosing, work),
        Case(_SIMULATE, simulating, work),
        Case(_LOOP, looping_in_python, {**work, "jit_compile": False}),
        Case(_XLA_LOOP, looping_in_python, {**work, "jit_compile": True}),
    ]
    measured = run.measure(cases, repetitions)
    beyond = {case: _beyond(measured, case) for case in measured.by_case}
    run.publish(
        title=f"{env}, {num_envs} envs, {workers} workers: us per batch step",
        measured=measured,
        columns={
            "us per batch step": median(MICROSECONDS),
            "lowest - highest": spread(MICROSECONDS),
            "minus BatchEnv.step": lambda _, case: _number(beyond[case], ",.0f"),
            "/ simulate()": lambda _, case: _number(
                measured.ratio(case, _SIMULATE, MICROSECONDS)
                if case in (_LOOP, _XLA_LOOP)
                else None,
                ".2f",
            ),
        },
        notes=[
            "BatchEnv.step alone is called from Python with given actions. The "
            "policy and the graph account for the additional time of simulate()."
        ],
        results={"beyond_the_lane_us": beyond},
    )


def _beyond(measured: Measurements, case: str) -> float | None:
    """Return the median of the time that a case takes in addition to `_LANE`."""
    if _LANE not in measured.by_case or case in (_LANE, _POLICY):
        return None
    pairs = zip(
        measured.values(case, MICROSECONDS),
        measured.values(_LANE, MICROSECONDS),
        strict=True,
    )
    return statistics.median(value - lane for value, lane in pairs)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
