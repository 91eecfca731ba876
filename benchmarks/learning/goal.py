"""`goal`: how long PPO takes to reach a score, compared with Stable-Baselines3.

Each trainer has the settings that its project recommends for the task: ppo uses the
named config, and Stable-Baselines3 the settings of RL Baselines3 Zoo. The score is the
mean return of training episodes, with sampled actions, which both trainers record. Each
repetition trains a new policy with a different seed; its time includes everything
except loading libraries.
"""

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.peers import import_peer
from benchmarks.command import CORES, Repetitions, Run, Workers, sub_command
from benchmarks.harness import Case
from benchmarks.learning.rollouts import load_tensorflow
from benchmarks.result import median, ratio
from envserve.bench.interleaved import Measure, Measurements
from envserve.bench.workload import Workload
from ppo.config.named_configs import CONFIGS
from ppo.run_folder.folder import RunFolder

GOALS = {"cartpole": 475.0, "cheetah": 3000.0}
"""Maps tasks to goals: the mean return of the last training episodes (at most 100)."""

SECONDS, STEPS, RETURN = "seconds", "steps", "mean_return"
"""Measured numbers: time, env steps and mean return at the goal or the step limit."""

_OURS, _SB3 = "ppo", "SB3, rl-zoo's settings"


@sub_command
def goal(
    run: Run,
    task: Annotated[
        str, typer.Option(help=f"Named config: {' or '.join(GOALS)}.")
    ] = "cartpole",
    target: Annotated[
        float | None,
        typer.Option(help="Mean return to reach. Default: the goal of the task."),
    ] = None,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Env steps after which a repetition stops.")
    ] = 1_000_000,
    workers: Workers = CORES,
    repetitions: Repetitions = 3,
) -> None:
    """Measure the seconds until a score is reached, including compilation."""
    if task not in GOALS:
        raise typer.BadParameter(f"expected one of {', '.join(GOALS)}, got {task!r}")
    config = CONFIGS[task]
    score = GOALS[task] if target is None else target
    work: dict[str, Any] = {"task": task, "goal": score, "max_steps": max_steps}
    cases = [
        Case(_OURS, learning_ours, {**work, "workers": workers}),
        Case(_SB3, learning_sb3, work),
    ]
    Workload(config.env_name, 1, 1, 0).check()

    def all_seconds(measured: Measurements, case: str) -> str:
        return ", ".join(f"{value:,.1f}" for value in measured.values(case, SECONDS))

    def num_reached(measured: Measurements, case: str) -> str:
        returns = measured.values(case, RETURN)
        return f"{sum(value >= score for value in returns)} of {len(returns)}"

    run.publish(
        title=f"{config.env_name}: seconds until the last (at most 100) training "
        f"episodes have a mean return of {score:g}",
        measured=run.measure(cases, repetitions),
        columns={
            "seconds": median(SECONDS, ",.1f"),
            "each": all_seconds,
            "steps": median(STEPS),
            "reached": num_reached,
            "/ ppo": ratio(_OURS, SECONDS),
        },
        notes=[
            "Medians over seeds. A seed that did not reach the goal counts with the "
            "seconds until it stopped."
        ],
    )


@contextlib.contextmanager
def learning_ours(
    task: str, goal: float, max_steps: int, workers: int
) -> Iterator[Measure]:
    """Train a named config with `ppo.train.train`."""
    load_tensorflow()
    from ppo.environments import env_maker
    from ppo.train import Progress, train

    seeds = itertools.count()

    def measure() -> Mapping[str, float]:
        config = CONFIGS[task].replace(seed=next(seeds), total_steps=max_steps)
        last: list[Progress] = []

        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            train(
                config,
                RunFolder.create(Path(folder, "run"), config),
                env_maker(config, num_workers=workers),
                on_progress=last.append,
                # `train` calls `should_stop` before `on_progress`, so training ends one
                # iteration after the one that reaches the goal.
                should_stop=lambda: bool(last) and last[-1].mean_return >= goal,
            )
        seconds = time.perf_counter() - started
        return {SECONDS: seconds, STEPS: last[-1].steps, RETURN: last[-1].mean_return}

    yield measure


@contextlib.contextmanager
def learning_sb3(task: str, goal: float, max_steps: int) -> Iterator[Measure]:
    """Train with Stable-Baselines3's PPO and the settings of RL Baselines3 Zoo."""
    torch = import_peer("torch")
    stable_baselines3 = import_peer("stable_baselines3")
    torch.set_num_threads(1)
    seeds = itertools.count()

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        envs, settings = _zoo(task, stable_baselines3, torch)
        with contextlib.closing(envs):
            model = stable_baselines3.PPO(
                "MlpPolicy", envs, seed=next(seeds), device="cpu", **settings
            )
            mean_return = math.nan

            def should_continue(local: Mapping[str, Any], _: object) -> bool:
                nonlocal mean_return
                returns = [episode["r"] for episode in model.ep_info_buffer]
                if returns:
                    mean_return = sum(returns) / len(returns)
                return not mean_return >= goal

            model.learn(max_steps, callback=should_continue)
            steps = model.num_timesteps
        return {
            SECONDS: time.perf_counter() - started,
            STEPS: steps,
            RETURN: mean_return,
        }

    yield measure


def _zoo(task: str, stable_baselines3: Any, torch: Any) -> tuple[Any, dict[str, Any]]:
    """Return envs, and the settings in `hyperparams/ppo.yml` of RL Baselines3 Zoo."""
    vec_env = stable_baselines3.common.vec_env
    monitor = stable_baselines3.common.monitor.Monitor
    num_envs = {"cartpole": 8, "cheetah": 1}[task]
    load = Workload(CONFIGS[task].env_name, num_envs, 1, 0)
    envs = vec_env.DummyVecEnv(
        [lambda make=make: monitor(make()) for make in load.env_functions()]
    )
    if task == "cartpole":
        return envs, {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": lambda remaining: 1e-3 * remaining,
            "clip_range": lambda remaining: 0.2 * remaining,
        }
    return vec_env.VecNormalize(envs, gamma=0.98), {
        "n_steps": 512,
        "batch_size": 64,
        "gae_lambda": 0.92,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.000401762,
        "learning_rate": 2.0633e-05,
        "clip_range": 0.1,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    }
