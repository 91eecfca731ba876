"""`train`: PPO end to end, ours beside Stable-Baselines3's at equal settings."""

from collections.abc import Mapping
from typing import Annotated

import typer

from benchmarks.command import (
    CORES,
    EnvName,
    NumEnvs,
    Repetitions,
    Run,
    Workers,
    sub_command,
)
from benchmarks.harness import Case
from benchmarks.learning.trainers import (
    ROLLOUT,
    TOTAL,
    UPDATE,
    training_ours,
    training_sb3,
)
from benchmarks.plot import Plot
from benchmarks.result import median, ratio, spread
from envserve.bench.load import Load
from envserve.bench.turns import Number
from ppo.config import Config

__all__ = ["train"]

_OURS = "ppo"
_SUBPROCESS, _DUMMY = "SB3, SubprocVecEnv", "SB3, DummyVecEnv"
_NUMBERS = {"rollout": ROLLOUT, "update": UPDATE, "total": TOTAL}


@sub_command
def train(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    horizon: Annotated[
        int, typer.Option(min=1, help="Batch steps of a rollout.")
    ] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over a rollout.")] = 10,
    minibatch_size: Annotated[int, typer.Option(min=1, help="Steps.")] = 64,
    iterations: Annotated[int, typer.Option(min=1, help="Of each turn.")] = 4,
    repetitions: Repetitions = 3,
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
    Load(env, 1, 1, 0).check()
    measured = run.measure(cases, repetitions)
    steps = config.steps_per_iteration

    def speed(numbers: Mapping[str, float]) -> float:
        return steps / numbers[TOTAL]

    def milliseconds(name: str) -> Number:
        return lambda numbers: 1e3 * numbers[name]

    run.publish(
        title=f"PPO on {env}, {num_envs} envs, {steps:,} steps an iteration, {epochs} "
        f"epochs, minibatches of {minibatch_size}, networks of 64x64: ms per iteration",
        measured=measured,
        columns={
            "steps/s": median(speed),
            "lowest - highest": spread(speed),
            **{f"{n} ms": median(milliseconds(k)) for n, k in _NUMBERS.items()},
            **{f"{n} x": ratio(_OURS, key) for n, key in _NUMBERS.items()},
        },
        plot=Plot("env steps per second, end to end", speed),
        notes=[
            f"ppo trains in {workers} workers with two TensorFlow threads, "
            "SB3 with one torch thread. Both as they train: ours normalises "
            "observations and scales rewards besides, and writes metrics. x: how many "
            "times as long as ppo's.",
        ],
        results={
            "ratios": {
                case: {
                    key: measured.ratio(case, _OURS, key) for key in _NUMBERS.values()
                }
                for case in measured.by_case
            }
        },
    )
