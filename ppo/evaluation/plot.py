"""Curves of runs over env steps.

Runs that share a config but for the seed become one curve: their mean, and a band of
one standard deviation around it, as far as all of them have come.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppo.config.config import Config
from ppo.errors import BadInputError, OutputError, suggestion
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import read_metrics

_MOST_KEYS = 3


class Curve(NamedTuple):
    """One metric over env steps, of one run or of several that differ in their seed."""

    label: str
    num_runs: int
    steps: np.ndarray  # [N]
    mean: np.ndarray  # [N]
    deviation: np.ndarray  # [N], population standard deviation over the runs


class _Group(NamedTuple):
    """Runs that share a config but for the seed."""

    config: Config
    paths: list[Path]


def read_curves(runs: Sequence[Path], metric: str = "mean_return") -> list[Curve]:
    """Read the metrics of run folders, and join those that only differ in their seed.

    Where joined runs have their numbers at different steps, lines between these are
    followed.

    Args:
        runs: at least one run's folder.
        metric: a name in `metrics.jsonl`.

    Returns:
        A curve per config, in the order of the runs.

    Raises:
        RunFolderError: a folder is not that of a run, or has no metrics.
        BadInputError: there are no numbers of that name, or runs of one config have
            no steps in common.
    """
    groups = _grouped(runs)
    labels = _labels(groups)
    return [
        _joined(group, label, metric)
        for group, label in zip(groups, labels, strict=True)
    ]


def draw_curves(curves: Sequence[Curve], metric: str, out: Path) -> None:
    """Draw curves of a metric to an image file, whose suffix says of which kind.

    Raises:
        BadInputError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"Plots need matplotlib ({error}): pip install 'envserve[plot]'."
        ) from error
    figure: Any = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        count = "" if curve.num_runs == 1 else f" ({curve.num_runs} runs)"
        axes.plot(curve.steps, curve.mean, label=curve.label + count)
        if curve.num_runs > 1:
            low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
            axes.fill_between(curve.steps, low, high, alpha=0.2, linewidth=0)
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric.replace("_", " "))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{out}: expected an image file that can be written, such as curves.png; "
            f"{error}."
        ) from error


def _grouped(runs: Sequence[Path]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for path in runs:
        config = RunFolder.open(path)[1].replace(seed=0)
        groups.setdefault(repr(config), _Group(config, [])).paths.append(path)
    return list(groups.values())


def _labels(groups: Sequence[_Group]) -> list[str]:
    """Name each group by the settings that tell it from the others."""
    first = groups[0].config
    if len(groups) == 1:
        return [first.env_name]
    keys = [
        key
        for key in vars(first)
        if any(vars(group.config)[key] != vars(first)[key] for group in groups)
    ]
    if len(keys) > _MOST_KEYS:
        return [group.paths[0].resolve().name for group in groups]
    return [
        ", ".join(_setting(key, vars(group.config)[key]) for key in keys)
        for group in groups
    ]


def _setting(key: str, value: Any) -> str:
    return value if key == "env_name" else f"{key}={value}"


def _joined(group: _Group, label: str, metric: str) -> Curve:
    series = [_series(path, metric) for path in group.paths]
    first = max(steps[0] for steps, _ in series)
    last = min(steps[-1] for steps, _ in series)
    all_steps = np.unique(np.concatenate([steps for steps, _ in series]))
    steps = all_steps[(all_steps >= first) & (all_steps <= last)]
    if not steps.size:
        raise BadInputError(
            f"{', '.join(map(str, group.paths))}: expected runs of one config to have "
            f"{metric} at common steps, but one ends at {last:,.0f} and another begins "
            f"at {first:,.0f}; leave one of them out."
        )
    values = np.stack([np.interp(steps, *points) for points in series])
    return Curve(label, len(series), steps, values.mean(axis=0), values.std(axis=0))


def _series(path: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Read steps and values of one run, float64 `[N]` each."""
    rows = read_metrics(path / "metrics.jsonl")
    names = {name for row in rows for name in row}
    if metric not in names:
        raise BadInputError(
            f"{path}: expected a metric of the run, got {metric!r}."
            f"{suggestion(metric, names)} There are {', '.join(sorted(names))}."
        )
    points = [
        (row["steps"], row[metric]) for row in rows if row.get(metric) is not None
    ]
    if not points:
        raise BadInputError(
            f"{path}: expected numbers of {metric}, but it has none yet; train on."
        )
    steps, values = np.array(points, np.float64).T
    return steps, values
