"""`goal`: how long PPO takes to a score, ours beside Stable-Baselines3's.

Each trainer has the settings that its own project recommends for the task: ours the
named config, Stable-Baselines3 those of RL Baselines3 Zoo. Both count the training
returns of sampled actions, which both note anyway; every repetition has another seed.
"""

from typing import Annotated, Any

import typer

from benchmarks.command import CORES, Repetitions, Run, Workers, sub_command
from benchmarks.harness import Case
from benchmarks.learning.learners import (
    RETURN,
    SECONDS,
    STEPS,
    learning_ours,
    learning_sb3,
)
from benchmarks.plot import Plot
from benchmarks.result import median, ratio
from envserve.bench.load import Load
from envserve.bench.turns import Measurements
from ppo.configs import CONFIGS

__all__ = ["GOALS", "goal"]

GOALS = {"cartpole": 475.0, "cheetah": 3000.0}
"""Mean return of the last training episodes, 100 at most."""

_OURS, _SB3 = "ppo", "SB3, rl-zoo's settings"


@sub_command
def goal(
    run: Run,
    task: Annotated[
        str, typer.Option(help=f"A config: {' or '.join(GOALS)}.")
    ] = "cartpole",
    target: Annotated[
        float | None, typer.Option(help="Mean return to reach. Default: the task's.")
    ] = None,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Env steps after which it is given up.")
    ] = 1_000_000,
    workers: Workers = CORES,
    repetitions: Repetitions = 3,
) -> None:
    """Measure the seconds to a score, compilation included."""
    if task not in GOALS:
        raise typer.BadParameter(f"expected one of {', '.join(GOALS)}, got {task!r}")
    config = CONFIGS[task]
    score = GOALS[task] if target is None else target
    work: dict[str, Any] = {"task": task, "goal": score, "max_steps": max_steps}
    cases = [
        Case(_OURS, learning_ours, {**work, "workers": workers}),
        Case(_SB3, learning_sb3, work),
    ]
    Load(config.env_name, 1, 1, 0).check()

    def each(measured: Measurements, case: str) -> str:
        return ", ".join(f"{value:,.1f}" for value in measured.values(case, SECONDS))

    def reached(measured: Measurements, case: str) -> str:
        returns = measured.values(case, RETURN)
        return f"{sum(value >= score for value in returns)} of {len(returns)}"

    run.publish(
        title=f"{config.env_name}: seconds until the last training episodes, 100 at "
        f"most, have a mean return of {score:g}",
        measured=run.measure(cases, repetitions),
        columns={
            "seconds": median(SECONDS, ",.1f"),
            "each": each,
            "steps": median(STEPS),
            "reached": reached,
            "takes longer by": ratio(_OURS, SECONDS),
        },
        plot=Plot("seconds to the goal", SECONDS),
        notes=[
            "Medians over seeds. Of a seed that did not reach it, the seconds until it "
            "was given up count."
        ],
    )
