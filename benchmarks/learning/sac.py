"""`sac`: env steps per second of SAC, compared with Stable-Baselines3.

Both trainers use the settings of the named config `cheetah-sac`, for example equal
networks, batches of equal size, and one gradient step per env step. Stable-Baselines3
steps one env, which is its default.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from benchmarks.cases.peers import import_peer
from benchmarks.command import CORES, Repetitions, Run, Workers, sub_command
from benchmarks.harness import Case
from benchmarks.learning.train import paused_training
from benchmarks.result import median, ratio, spread
from envserve.bench.interleaved import SPEED, Measure
from ppo.config import Config
from ppo.config.named_configs import CONFIGS

SAC, SB3_SAC = "ppo, SAC", "SB3, SAC"

_RANDOM_STEPS = 256


@sub_command
def sac(
    run: Run,
    steps: Annotated[
        int, typer.Option(min=16, help="Env steps per measurement.")
    ] = 3_000,
    workers: Workers = CORES,
    torch_threads: Annotated[
        int, typer.Option(min=1, help="Threads of torch, for Stable-Baselines3.")
    ] = 2,
    repetitions: Repetitions = 3,
) -> None:
    """Measure env steps per second of SAC on HalfCheetah, one update per step."""
    work = {"config": CONFIGS["cheetah-sac"], "steps": steps}
    cases = [
        Case(SAC, training_ours, {**work, "workers": workers}),
        Case(SB3_SAC, training_sb3, {**work, "torch_threads": torch_threads}),
    ]
    run.publish(
        title=f"SAC on HalfCheetah-v5, {steps:,} env steps per measurement",
        measured=run.measure(cases, repetitions),
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "x": ratio(SB3_SAC, SPEED),
        },
        notes=[
            "Batches of 256 transitions, networks of 256x256, one gradient step per "
            f"env step. ppo steps 4 envs in {workers} workers and trains with two "
            "TensorFlow threads; SB3 steps one env in its process, with "
            f"{torch_threads} torch threads. x: steps/s relative to SB3's.",
        ],
    )


@contextlib.contextmanager
def training_ours(config: Config, steps: int, workers: int) -> Iterator[Measure]:
    """Train with `ppo.train.train`; training is paused between measurements."""
    size = config.steps_per_iteration
    short = {**config.algorithm_settings, "random_steps": _RANDOM_STEPS}
    config = config.replace(algorithm_settings=short)
    with paused_training(config, workers) as (gate, _):
        # The first updates compile, so do not measure them.
        gate.let_pass(2 * _RANDOM_STEPS // size)

        def measure() -> Mapping[str, float]:
            iterations = steps // size
            return {SPEED: iterations * size / gate.let_pass(iterations)}

        yield measure


@contextlib.contextmanager
def training_sb3(config: Config, steps: int, torch_threads: int) -> Iterator[Measure]:
    """Train with Stable-Baselines3's SAC."""
    torch = import_peer("torch")
    torch.set_num_threads(torch_threads)
    stable_baselines3 = import_peer("stable_baselines3")
    settings = config.algorithm_settings
    model = stable_baselines3.SAC(
        "MlpPolicy",
        config.env_name,
        learning_rate=config.learning_rate,
        buffer_size=settings["replay_size"],
        batch_size=settings["batch_size"],
        learning_starts=_RANDOM_STEPS,
        tau=settings["tau"],
        gamma=config.discount,
        policy_kwargs={"net_arch": list(config.policy_layers)},
        seed=config.seed,
        device="cpu",
    )
    model.learn(2 * _RANDOM_STEPS)

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        model.learn(steps, reset_num_timesteps=False)
        return {SPEED: steps / (time.perf_counter() - started)}

    yield measure
