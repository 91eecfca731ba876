"""`bench train`: PPO end to end, ours beside Stable-Baselines3's at equal settings."""

from typing import Annotated

import typer

from envserve.bench.case_process import Case
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import check_env
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    Workers,
    announcer,
    as_range,
    as_ratio,
    options_of,
)
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from ppo.bench.trainers import ROLLOUT, TOTAL, UPDATE, training_ours, training_sb3
from ppo.config import Config

__all__ = ["train"]

_OURS = "ppo"
_SUBPROCESS, _DUMMY = "SB3, SubprocVecEnv", "SB3, DummyVecEnv"


def train(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    horizon: Annotated[
        int, typer.Option(min=1, help="Batch steps of a rollout.")
    ] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over a rollout.")] = 10,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Steps.")] = 64,
    iterations: Annotated[int, typer.Option(min=1, help="Of each turn.")] = 4,
    repetitions: Repetitions = 3,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure rollout, update and total of PPO's iterations."""
    config = Config(
        env_name=env,
        num_envs=num_envs,
        horizon=horizon,
        epochs=epochs,
        minibatch_size=minibatch_size,
    )
    work = {"config": config, "iterations": iterations}
    cases = [
        Case(_OURS, training_ours, {**work, "workers": workers}),
        Case(_SUBPROCESS, training_sb3, {**work, "vec_env": "SubprocVecEnv"}),
        Case(_DUMMY, training_sb3, {**work, "vec_env": "DummyVecEnv"}),
    ]
    cases = chosen(cases, only or [])
    check_env(env)
    outcome = take_turns(cases, repetitions, announcer())
    steps = config.steps_per_iteration
    report = Report(
        name="train",
        title=f"PPO on {env}, {num_envs} envs, {steps:,} steps an iteration, {epochs} "
        f"epochs, minibatches of {minibatch_size}, networks of 64x64: ms per iteration",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "steps/s", "lowest - highest", "rollout ms", "update ms"]
        + ["total ms", "rollout x", "update x", "total x"],
        rows=[_row(outcome, case, steps) for case in outcome.measured],
        notes=[
            f"ppo trains in {workers} workers with two TensorFlow threads, "
            "SB3 with one torch thread. Both as they train: ours normalises "
            "observations and scales rewards besides, and writes metrics. x: how many "
            "times as long as ppo's.",
        ],
        plot=Plot(
            "env steps per second, end to end",
            {case: _speeds(outcome, case, steps) for case in outcome.measured},
        ),
        results={
            "ratios": {
                case: {name: outcome.ratio(case, _OURS, name) for name in _NUMBERS}
                for case in outcome.measured
            }
        },
    )
    publish(report, Output(outdir, json_file, markdown))


_NUMBERS = (ROLLOUT, UPDATE, TOTAL)


def _speeds(outcome: Outcome, case: str, steps: int) -> list[float]:
    return [steps / seconds for seconds in outcome.values(case, TOTAL)]


def _row(outcome: Outcome, case: str, steps: int) -> list[str]:
    return [
        case,
        f"{steps / outcome.median(case, TOTAL):,.0f}",
        as_range(_speeds(outcome, case, steps)),
        *(f"{1e3 * outcome.median(case, name):,.0f}" for name in _NUMBERS),
        *(as_ratio(outcome.ratio(case, _OURS, name)) for name in _NUMBERS),
    ]
