"""The table and the plot of `docs/scores.md`, made of what the runs have come to.

Summaries of a few scores, one per seed, are those of Agarwal et al. 2021 (arXiv
2108.13264).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lab.tables import as_markdown
from benchmarks.scores.run_one import Score
from benchmarks.scores.tasks import TASKS, Task

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
_NUM_RESAMPLES = 10_000
_BEGIN, _END = "<!-- scores: begin -->\n", "<!-- scores: end -->\n"


class Summary(NamedTuple):
    """Scores of one task over seeds.

    Attributes:
      std: Over seeds, with n - 1; NaN of one seed.
      low: Lower end of the 95 % interval of the mean, by bootstrap over seeds.
      high: Its upper end.
    """

    num_seeds: int
    mean: float
    std: float
    iqm: float
    low: float
    high: float


def summarize(scores: Sequence[float]) -> Summary:
    """Summarise the scores of one task, one per seed.

    The interval is the percentile bootstrap of the mean: with three to five seeds it is
    narrower than it should be. The same scores give the same interval.
    """
    values = np.asarray(scores, np.float64)
    generator = np.random.default_rng(0)
    draws = generator.integers(len(values), size=(_NUM_RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return Summary(
        num_seeds=len(values),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else float("nan"),
        iqm=interquartile_mean(values),
        low=float(low),
        high=float(high),
    )


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half; scores at its ends count in part.

    Of 5 scores the lowest and the highest count nothing, and their neighbours three
    quarters: 25 % of the weight is cut off at each end.
    """
    values = np.sort(np.asarray(scores, np.float64))
    edges = np.linspace(0.0, 1.0, len(values) + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, 1)
    return float((values * weights).sum() / weights.sum())


def table_rows(scores: Mapping[str, Sequence[Score]]) -> list[list[str]]:
    """Return a row per task that has scores, in the order of `TASKS`."""
    return [_row(task, scores[task.name]) for task in TASKS if scores.get(task.name)]


def write_document(path: Path, scores: Mapping[str, Sequence[Score]]) -> None:
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
            as_markdown(COLUMNS, table_rows(scores), num_texts=_NUM_TEXTS),
            _per_seed(scores),
            _versions(scores),
        ]
    )
    path.write_text(f"{before}{begin}\n{tables}\n{end}{after}", encoding="utf-8")


def draw_curves(scores: Mapping[str, Sequence[Score]], path: Path) -> None:
    """Draw each task's evaluations along the curve: mean over seeds, and their range.

    Needs matplotlib, of the extra `plot`.
    """
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if scores.get(task.name)]
    num_columns = 4
    num_rows = -(-len(tasks) // num_columns)
    figure: Any = Figure(figsize=(14, 2.6 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        _draw(axes, task, scores[task.name])
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def _draw(axes: Any, task: Task, scores: Sequence[Score]) -> None:
    steps = np.array([step for step, _ in scores[0].curve])
    means = np.array([[mean for _, mean in score.curve] for score in scores])
    axes.plot(steps, means.mean(axis=0))
    axes.fill_between(
        steps, means.min(axis=0), means.max(axis=0), alpha=0.2, linewidth=0
    )
    axes.axhline(task.goal, color="gray", linestyle="--", linewidth=0.8)
    axes.set_title(f"{scores[0].env_name}, {len(scores)} seeds", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _row(task: Task, scores: Sequence[Score]) -> list[str]:
    values = [score.value(task.metric) for score in scores]
    summary = summarize(values)
    seconds = np.median([score.seconds for score in scores])
    return [
        scores[0].env_name,
        task.name.rpartition("-")[2],
        task.metric,
        f"{task.goal:g}",
        task.anchor,
        _number(summary.mean),
        _number(summary.std),
        _number(summary.iqm),
        _interval(summary),
        f"{summary.num_seeds} of {task.num_seeds}",
        _number(min(values)),
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


def _per_seed(scores: Mapping[str, Sequence[Score]]) -> str:
    rows = [
        [
            score.env_name,
            task.name.rpartition("-")[2],
            str(score.seed),
            f"{_number(score.final)} ± {_number(score.final_std)}",
            _number(score.best),
            _number(score.train_return),
        ]
        for task in TASKS
        for score in scores.get(task.name, ())
    ]
    heads = ("env", "steps", "seed", "E ± std of episodes", "B", "training")
    return as_markdown(heads, rows, num_texts=2)


def _versions(scores: Mapping[str, Sequence[Score]]) -> str:
    found = {
        f"{name} {version}"
        for runs in scores.values()
        for score in runs
        for name, version in score.versions.items()
    }
    return f"Measured with {', '.join(sorted(found))}.\n"


def _number(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
