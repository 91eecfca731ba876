"""`bench simulate`: a rollout in one graph call against a loop in Python."""

import statistics
from typing import Annotated

import typer

from envserve.bench.case_process import Case
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import Load, check_env
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    Seconds,
    Workers,
    announcer,
    as_range,
    as_ratio,
    options_of,
)
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from ppo.bench.rollouts import (
    MICROSECONDS,
    RolloutLoad,
    choosing,
    looping_in_python,
    simulating,
    stepping_lane,
)

__all__ = ["simulate"]

_LANE = "BatchEnv.step alone"
_POLICY = "policy alone, in a graph"
_SIMULATE = "simulate()"
_LOOP = "Python loop, policy as tf.function"
_XLA_LOOP = "Python loop, policy compiled by XLA"


def simulate(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "CartPole-v1",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    horizon: Annotated[int, typer.Option(min=1, help="Steps of a rollout.")] = 128,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 5,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure a rollout in the graph against driving the envs from Python."""
    work = RolloutLoad(Load(env, num_envs, workers, seconds), horizon)
    cases = [
        Case(_LANE, stepping_lane, {"work": work}),
        Case(_POLICY, choosing, {"work": work}),
        Case(_SIMULATE, simulating, {"work": work}),
        Case(_LOOP, looping_in_python, {"work": work, "jit_compile": False}),
        Case(_XLA_LOOP, looping_in_python, {"work": work, "jit_compile": True}),
    ]
    cases = chosen(cases, only or [])
    check_env(env)
    outcome = take_turns(cases, repetitions, announcer())
    report = Report(
        name="simulate",
        title=f"{env}, {num_envs} envs, {workers} workers: us per batch step",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "us per batch step", "lowest - highest", "beyond the lane"]
        + ["simulate() is faster by"],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            "The lane is BatchEnv.step from Python with actions that are there. What "
            "simulate() takes beyond it is the policy and what the graph costs."
        ],
        plot=Plot(
            "us per batch step",
            outcome.all_values(MICROSECONDS),
        ),
        results={
            "beyond_the_lane_us": {c: _beyond(outcome, c) for c in outcome.measured}
        },
    )
    publish(report, Output(outdir, json_file, markdown))


def _beyond(outcome: Outcome, case: str) -> float | None:
    """Return the median of what a case takes more than the lane in the same turn."""
    if _LANE not in outcome.measured or case in (_LANE, _POLICY):
        return None
    pairs = zip(
        outcome.values(case, MICROSECONDS),
        outcome.values(_LANE, MICROSECONDS),
        strict=True,
    )
    return statistics.median(value - lane for value, lane in pairs)


def _row(outcome: Outcome, case: str) -> list[str]:
    beyond = _beyond(outcome, case)
    is_loop = case in (_LOOP, _XLA_LOOP)
    faster = outcome.ratio(case, _SIMULATE, MICROSECONDS) if is_loop else None
    return [
        case,
        f"{outcome.median(case, MICROSECONDS):,.0f}",
        as_range(outcome.values(case, MICROSECONDS)),
        "-" if beyond is None else f"{beyond:,.0f}",
        as_ratio(faster),
    ]
