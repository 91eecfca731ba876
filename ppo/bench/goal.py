"""`bench goal`: how long PPO takes to a score, ours beside Stable-Baselines3's.

Each trainer has the settings that its own project recommends for the task: ours the
named config, Stable-Baselines3 those of RL Baselines3 Zoo. Both count the training
returns of sampled actions, which both note anyway; every repetition has another seed.
"""

from typing import Annotated, Any

import typer

from envserve.bench.case_process import Case
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import check_env
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    Only,
    OutDir,
    Repetitions,
    Workers,
    announcer,
    as_ratio,
    options_of,
)
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from ppo.bench.learners import RETURN, SECONDS, STEPS, learning_ours, learning_sb3
from ppo.configs import CONFIGS

__all__ = ["GOALS", "goal"]

GOALS = {"cartpole": 475.0, "cheetah": 3000.0}
"""Mean return of the last training episodes, 100 at most."""

_OURS, _SB3 = "ppo", "SB3, rl-zoo's settings"


def goal(
    context: typer.Context,
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
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
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
    cases = chosen(cases, only or [])
    check_env(config.env_name)
    outcome = take_turns(cases, repetitions, announcer())
    report = Report(
        name="goal",
        title=f"{config.env_name}: seconds until the last training episodes, 100 at "
        f"most, have a mean return of {score:g}",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "seconds", "each", "steps", "reached", "takes longer by"],
        rows=[_row(outcome, case, score) for case in outcome.measured],
        notes=[
            "Medians over seeds. Of a seed that did not reach it, the seconds until it "
            "was given up count."
        ],
        plot=Plot("seconds to the goal", outcome.all_values(SECONDS)),
        results={},
    )
    publish(report, Output(outdir, json_file, markdown))


def _row(outcome: Outcome, case: str, score: float) -> list[str]:
    returns = outcome.values(case, RETURN)
    return [
        case,
        f"{outcome.median(case, SECONDS):,.1f}",
        ", ".join(f"{seconds:,.1f}" for seconds in outcome.values(case, SECONDS)),
        f"{outcome.median(case, STEPS):,.0f}",
        f"{sum(value >= score for value in returns)} of {len(returns)}",
        as_ratio(outcome.ratio(case, _OURS, SECONDS)),
    ]
