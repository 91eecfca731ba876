"""Plot the learning curves of runs: a metric over env steps.

Runs whose configs differ only in the seed are merged into one curve, which shows their
mean and a band of one standard deviation over the steps that all runs have reached.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envserve.envs.user_envs import env_name_of
from envserve.regular_file import open_no_link
from envserve.text import install_command, one_line
from ppo.config.config import Config
from ppo.errors import BadInputError, OutputError, suggestion
from ppo.run_folder.folder import RunFolder, seed_folders
from ppo.run_folder.metrics_file import read_metrics

_MAX_KEYS = 3  # maximum number of settings in the label of a curve


class Curve(NamedTuple):
    """One metric over env steps, for one run or runs that differ only in the seed."""

    label: str
    num_runs: int
    steps: np.ndarray  # [N]
    mean: np.ndarray  # [N]
    deviation: np.ndarray  # [N], population standard deviation over the runs


class _Group(NamedTuple):
    """Runs whose configs differ only in the seed."""

    config: Config
    paths: list[Path]


def read_curves(runs: Sequence[Path], metric: str = "mean_return") -> list[Curve]:
    """Read the metrics of run folders, and merge runs that differ only in the seed.

    Merged runs may report at different steps; their values are interpolated linearly.

    Args:
      runs: Run folders, at least one. The folder of several seeds is replaced by the
        run folders of the seeds that have values of the metric.
      metric: Name of a metric in `metrics.jsonl`.

    Returns:
      A curve per config, in the order of the runs.

    Raises:
      RunFolderError: A folder is not a run folder, or has no metrics.
      BadInputError: A run has no such metric, or the runs of one config have no
        steps in common.
    """
    groups = _group_runs(runs, metric)
    labels = _labels(groups)
    return [
        _merge(group, label, metric)
        for group, label in zip(groups, labels, strict=True)
    ]


def draw_curves(curves: Sequence[Curve], metric: str, out: Path) -> None:
    """Plot curves of a metric into an image file, whose suffix selects the format.

    Raises:
      BadInputError: Matplotlib is not installed.
      OutputError: The file cannot be written.
    """
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"Plots need matplotlib ({error}); {install_command('plot')}."
        ) from error
    # A file `matplotlibrc` in the working directory could select LaTeX, which runs
    # commands that the file contains.
    with rc_context({"text.usetex": False}):
        _draw_curves(curves, metric, out)


def _draw_curves(curves: Sequence[Curve], metric: str, out: Path) -> None:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        count = "" if curve.num_runs == 1 else f" ({curve.num_runs} runs)"
        label = _literal(curve.label) + count
        marker = "o" if len(curve.steps) == 1 else ""  # a line needs two points
        axes.plot(curve.steps, curve.mean, marker=marker, label=label)
        if curve.num_runs > 1:
            low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
            axes.fill_between(curve.steps, low, high, alpha=0.2, linewidth=0)
    axes.set_xlabel("env steps")
    axes.set_ylabel(_literal(metric.replace("_", " ")))
    axes.legend()
    axes.grid(alpha=0.3)
    partial = out.with_name(f"{out.name}.partial")
    try:
        # Replace the file: it may be a link to another file, in a stranger's run.
        with open(partial, "wb", opener=open_no_link) as file:
            figure.savefig(file, format=out.suffix[1:], dpi=150)
        partial.replace(out)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OutputError(
            f"{out}: expected a writable image file, for example curves.png; {error}."
        ) from error


def _literal(text: str) -> str:
    """Return text that Matplotlib draws as it is, without formulas between dollars."""
    text = one_line(text).replace("$", r"\$")
    return f" {text}" if text[:1] == "_" else text  # legends leave out labels like _x


def _group_runs(runs: Sequence[Path], metric: str) -> list[_Group]:
    groups: dict[str, _Group] = {}
    paths = [path for run in runs for path in _seeds_with(metric, run) or [run]]
    # A run may be given twice, for example together with the folder of its study.
    for path in {os.path.realpath(path): path for path in paths}.values():
        config = RunFolder.read(path)[1].replace(seed=0)
        groups.setdefault(repr(config), _Group(config, [])).paths.append(path)
    return list(groups.values())


def _seeds_with(metric: str, study: Path) -> list[Path]:
    """Return the run folders of the seeds that have values of a metric.

    Seeds that have not started yet, or have failed early, have none. If no seed has
    values, return all seeds, so that the error names the cause.
    """
    found: list[Path] = []
    for path in (seeds := seed_folders(study)):
        with contextlib.suppress(BadInputError):
            _series(path, metric)
            found.append(path)
    return found or seeds


def _labels(groups: Sequence[_Group]) -> list[str]:
    """Return a label per group: the name of its run, and the settings that differ."""
    names = _names([group.paths for group in groups])
    settings = [
        {**group.config.all_settings, "env_name": env_name_of(group.config.env_name)}
        for group in groups
    ]
    # A run does not store the default values of a user's algorithm.
    defaults = {key: "default" for values in settings for key in values}
    settings = [defaults | values for values in settings]
    keys = [
        key
        for key in defaults
        if any(values[key] != settings[0][key] for values in settings)
    ]
    if not 0 < len(keys) <= _MAX_KEYS:
        return names
    return [
        f"{name}: {', '.join(f'{key}={values[key]}' for key in keys)}"
        for name, values in zip(names, settings, strict=True)
    ]


def _names(groups: Sequence[Sequence[Path]]) -> list[str]:
    """Return the name of each group's folder, with parents if names are not unique.

    The folder of a group is the folder of its first run or, if its runs are the seeds
    of a study, the folder of the study.
    """
    folders = [paths[0].resolve() for paths in groups]
    for number, paths in enumerate(groups):
        if len(paths) > 1 and folders[number].name.startswith("seed-"):
            folders[number] = folders[number].parent
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len({*names}) == len({*folders}):
            return names
        depth += 1


def _merge(group: _Group, label: str, metric: str) -> Curve:
    series = [_series(path, metric) for path in group.paths]
    first = max(steps[0] for steps, _ in series)
    last = min(steps[-1] for steps, _ in series)
    all_steps = np.unique(np.concatenate([steps for steps, _ in series]))
    steps = all_steps[(all_steps >= first) & (all_steps <= last)]
    if not steps.size:
        raise BadInputError(
            f"{', '.join(map(str, group.paths))}: expected runs of one config to have "
            f"common steps with {metric}, but one run ends at step {last:,.0f} and "
            f"another begins at step {first:,.0f}; omit one of them."
        )
    values = np.stack([np.interp(steps, *points) for points in series])
    return Curve(label, len(series), steps, values.mean(axis=0), values.std(axis=0))


def _series(path: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the steps and values of a metric of one run, float64 `[N]` each."""
    rows = read_metrics(path / "metrics.jsonl")
    names = {name for row in rows for name in row}
    if metric not in names:
        raise BadInputError(
            f"{path}: the run has no metric {metric!r}."
            f"{suggestion(metric, names)} Metrics: {', '.join(sorted(names))}."
        )
    points = [
        (row["steps"], row[metric]) for row in rows if row.get(metric) is not None
    ]
    if not points:
        raise BadInputError(
            f"{path}: the run has no values of {metric} yet; continue training."
        )
    steps, values = np.array(points, np.float64).T
    return steps, values
