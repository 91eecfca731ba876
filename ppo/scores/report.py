"""The table and the plot of `docs/scores.md`, made of what the runs have come to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envserve.lab.tables import as_markdown
from ppo.scores.run_one import Outcome
from ppo.scores.statistics import Summary, summarize
from ppo.scores.tasks import TASKS, Task

__all__ = ["COLUMNS", "draw_curves", "table_rows", "write_document"]

COLUMNS = (
    "env",
    "steps",
    "metric",
    "goal",
    "anchor",
    "mean",
    "std",
    "IQM",
    "95 % interval",
    "seeds",
    "lowest",
    "reached",
    "seconds",
)
_NUM_TEXTS = 5
_BEGIN, _END = "<!-- scores: begin -->\n", "<!-- scores: end -->\n"


def table_rows(outcomes: Mapping[str, Sequence[Outcome]]) -> list[list[str]]:
    """Return a row per task that has outcomes, in the order of `TASKS`.

    Args:
        outcomes: by the name of their task.
    """
    return [
        _row(task, outcomes[task.name]) for task in TASKS if outcomes.get(task.name)
    ]


def write_document(path: Path, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Replace the tables in a Markdown document, between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path}: expected {_BEGIN.strip()} and {_END.strip()}")
    tables = "\n".join(
        [
            as_markdown(COLUMNS, table_rows(outcomes), num_texts=_NUM_TEXTS),
            _per_seed(outcomes),
            _versions(outcomes),
        ]
    )
    path.write_text(f"{before}{begin}\n{tables}\n{end}{after}", encoding="utf-8")


def draw_curves(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draw each task's evaluations along the curve: mean over seeds, and their range.

    Needs matplotlib, of the extra `plot`.
    """
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if outcomes.get(task.name)]
    num_columns = 4
    num_rows = -(-len(tasks) // num_columns)
    figure: Any = Figure(figsize=(14, 2.6 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        _draw(axes, task, outcomes[task.name])
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def _draw(axes: Any, task: Task, outcomes: Sequence[Outcome]) -> None:
    steps = np.array([step for step, _ in outcomes[0].curve])
    means = np.array([[mean for _, mean in outcome.curve] for outcome in outcomes])
    axes.plot(steps, means.mean(axis=0))
    axes.fill_between(
        steps, means.min(axis=0), means.max(axis=0), alpha=0.2, linewidth=0
    )
    axes.axhline(task.goal, color="gray", linestyle="--", linewidth=0.8)
    axes.set_title(f"{outcomes[0].env_name}, {len(outcomes)} seeds", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _row(task: Task, outcomes: Sequence[Outcome]) -> list[str]:
    scores = [outcome.score(task.metric) for outcome in outcomes]
    summary = summarize(scores)
    seconds = np.median([outcome.seconds for outcome in outcomes])
    return [
        outcomes[0].env_name,
        task.name.rpartition("-")[2],
        task.metric,
        f"{task.goal:g}",
        task.anchor,
        _number(summary.mean),
        _number(summary.std),
        _number(summary.iqm),
        _interval(summary),
        f"{summary.num_seeds} of {task.num_seeds}",
        _number(min(scores)),
        _verdict(task, summary),
        f"{seconds:.0f}",
    ]


def _interval(summary: Summary) -> str:
    if summary.num_seeds == 1:
        return "-"
    return f"{_number(summary.low)} to {_number(summary.high)}"


def _verdict(task: Task, summary: Summary) -> str:
    if round(summary.mean, 1) < task.goal:
        return "no"
    return "yes" if summary.num_seeds >= task.num_seeds else "so far"


def _per_seed(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    rows = [
        [
            outcome.env_name,
            task.name.rpartition("-")[2],
            str(outcome.seed),
            f"{_number(outcome.final)} ± {_number(outcome.final_std)}",
            _number(outcome.best),
            _number(outcome.train_return),
        ]
        for task in TASKS
        for outcome in outcomes.get(task.name, ())
    ]
    heads = ("env", "steps", "seed", "E ± std of episodes", "B", "training")
    return as_markdown(heads, rows, num_texts=2)


def _versions(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    found = {
        f"{name} {version}"
        for runs in outcomes.values()
        for outcome in runs
        for name, version in outcome.versions.items()
    }
    return f"Measured with {', '.join(sorted(found))}.\n"


def _number(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
