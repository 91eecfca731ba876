"""The tables and the plot of `docs/scores.md`, from the scores of the runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scores.run_one import Score
from benchmarks.scores.tasks import MEASURES, RANDOM_RETURNS, TASKS, Measure, Task
from benchmarks.support.tables import as_markdown, replace_marked
from ppo.config.named_configs import CONFIGS
from ppo.evaluation.statistics import bootstrap_interval, interquartile_mean

COLUMNS = (
    *("env", "steps", "goal", "anchors", "E", "B", "M", "std", "95 % interval"),
    *("seeds", "lowest E", "largest KL", "reached", "seconds"),
)
NUM_TEXTS = 4
"""Number of text columns; they are the first columns of a table."""


def measured(measure: Measure, scores: Sequence[Score]) -> list[float]:
    """Return one number per seed; their mean is the value of the measure.

    See `Task.measure` for the possible measures.
    """
    if measure == "E":
        return [score.final for score in scores]
    if measure == "B":
        return [score.best for score in scores]
    curves = _curves(scores)
    return list(curves[curves.mean(axis=1).argmax()])


def _curves(scores: Sequence[Score]) -> np.ndarray:
    """Return the mean returns of evaluations during training, `[evaluations, seeds]`.

    If curves have different lengths, they are cut to the length of the shortest.
    """
    curves = ([mean for _, mean in score.curve] for score in scores)
    return np.array(list(zip(*curves, strict=False)))


def table_rows(scores: Mapping[str, Sequence[Score]]) -> list[list[str]]:
    """Return one row for each task that has scores, in the order of `TASKS`."""
    return [_row(task, scores[task.name]) for task in TASKS if scores.get(task.name)]


def write_document(path: Path, scores: Mapping[str, Sequence[Score]]) -> None:
    """Replace the tables between the marks `scores` in a Markdown document.

    Raises:
      ValueError: The marks are missing.
    """
    tables = "\n".join(
        [
            as_markdown(COLUMNS, table_rows(scores), num_texts=NUM_TEXTS),
            _remarks(scores),
            f"{aggregate(scores)}\n",
            _per_seed(scores),
            _versions(scores),
        ]
    )
    replace_marked(path, "scores", tables)


def aggregate(scores: Mapping[str, Sequence[Score]]) -> str:
    """Return a sentence about all tasks: the interquartile mean of normalised scores.

    A score is 0 for random actions, and 1 for the goal of its task.
    """
    rows = [
        _normalised(task, measured(task.measure, scores[task.name]))
        for task in TASKS
        if scores.get(task.name)
    ]
    if not rows:
        return "No scores."
    values = np.concatenate(rows)
    low, high = bootstrap_interval(*rows, statistic=interquartile_mean)
    return (
        f"Normalised scores (0: random actions, 1: the goal) of {len(rows)} rows and "
        f"{len(values)} runs: interquartile mean {interquartile_mean(values):.3f}, "
        f"95 % interval {low:.3f} to {high:.3f}, mean {values.mean():.3f}."
    )


def _normalised(task: Task, values: Sequence[float]) -> np.ndarray:
    random = RANDOM_RETURNS[task.make_config(0).env_name]
    return (np.array(values) - random) / (task.goal - random)


def draw_curves(scores: Mapping[str, Sequence[Score]], path: Path) -> None:
    """Draw the learning curve of each task: the mean and the range over seeds.

    Requires matplotlib (extra `plot`).
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
    means = _curves(scores)
    steps = [step for step, _ in scores[0].curve][: len(means)]
    axes.plot(steps, means.mean(axis=1))
    axes.fill_between(
        steps, means.min(axis=1), means.max(axis=1), alpha=0.2, linewidth=0
    )
    axes.axhline(task.goal, color="gray", linestyle="--", linewidth=0.8)
    seeds = "1 seed" if len(scores) == 1 else f"{len(scores)} seeds"
    axes.set_title(", ".join([*_label(task, scores), seeds]), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _row(task: Task, scores: Sequence[Score]) -> list[str]:
    values = measured(task.measure, scores)
    has_several = len(scores) > 1
    return [
        *_label(task, scores),
        f"{task.measure} {task.goal:g}",
        task.anchors,
        *(_number(np.mean(measured(m, scores))) for m in MEASURES),
        _number(np.std(values, ddof=1)) if has_several else "-",
        " to ".join(map(_number, bootstrap_interval(values))) if has_several else "-",
        f"{len(scores)} of {task.num_seeds}",
        _number(min(score.final for score in scores)),
        _largest_kl(scores),
        _verdict(task, values),
        f"{np.median([score.seconds for score in scores]):.0f}",
    ]


def _largest_kl(scores: Sequence[Score]) -> str:
    kls = [score.max_kl for score in scores if score.max_kl is not None]
    return f"{max(kls):.2f}" if len(kls) == len(scores) else "-"


def _label(task: Task, scores: Sequence[Score]) -> list[str]:
    """Return the cells `env` and `steps` of a row.

    The steps are marked with a † if the settings have changed since the runs.
    """
    is_current = all(task.is_made_by(score.settings) for score in scores)
    algorithm = CONFIGS[task.config].algorithm.upper().removeprefix("PPO")
    steps = ", ".join(filter(None, (task.budget, algorithm, task.variant)))
    return [scores[0].env_name, steps + ("" if is_current else " †")]


def _remarks(scores: Mapping[str, Sequence[Score]]) -> str:
    declining = [name for name, runs in scores.items() if runs and _declines(runs)]
    legend = (
        "†: measured with settings that differ from the current ones, or that were not "
        "recorded.\n\n"
    )
    has_old = any("†" in row[1] for row in table_rows(scores))
    return (
        f"{legend if has_old else ''}"
        "E is below 0.95 of B, or the E of a seed is below half of the mean, in: "
        f"{', '.join(declining) or 'no row'}.\n"
    )


def _declines(scores: Sequence[Score]) -> bool:
    """Return whether the policies were better during training than at its end."""
    finals = measured("E", scores)
    end, best = np.mean(finals), np.mean(measured("B", scores))
    return bool(end < best - 0.05 * abs(best) or min(finals) < end - 0.5 * abs(end))


def _verdict(task: Task, values: Sequence[float]) -> str:
    if round(float(np.mean(values)), 1) < task.goal:
        return "no"
    return "yes" if len(values) >= task.num_seeds else "so far"


def _per_seed(scores: Mapping[str, Sequence[Score]]) -> str:
    rows = [
        [
            *_label(task, [score]),
            str(score.seed),
            f"{_number(score.final)} ± {_number(score.final_std)}",
            _number(score.best),
            _number(score.train_return),
            _largest_kl([score]),
        ]
        for task in TASKS
        for score in scores.get(task.name, ())
    ]
    headings = ("env", "steps", "seed", "E ± std of episodes", "B", "training", "KL")
    return as_markdown(headings, rows, num_texts=2)


def _versions(scores: Mapping[str, Sequence[Score]]) -> str:
    found = {
        f"{name} {version}"
        for runs in scores.values()
        for score in runs
        for name, version in score.versions.items()
    }
    return f"Measured with {', '.join(sorted(found))}.\n"


def _number(value: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
