"""Plots of benchmarks: bars with their lowest and highest, or lines over a size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Plot", "save_plot"]


@dataclass(frozen=True)
class Plot:
    """What to draw.

    Attributes:
      unit: What the numbers are.
      bars: By case, its number in every repetition.
      sizes: Where given, the cases stand along an axis of this meaning and these
        positions instead, joined by a line.
    """

    unit: str
    bars: Mapping[str, Sequence[float]]
    sizes: tuple[str, Sequence[float]] | None = None


def save_plot(plot: Plot, title: str, path: Path) -> str | None:
    """Draws to a PNG file; returns why not, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        return f"{error}; pip install 'envserve[bench]'"
    middles = [statistics.median(values) for values in plot.bars.values()]
    spread = [
        [
            middle - min(v)
            for middle, v in zip(middles, plot.bars.values(), strict=True)
        ],
        [
            max(v) - middle
            for middle, v in zip(middles, plot.bars.values(), strict=True)
        ],
    ]
    figure = Figure(figsize=(8, 1.5 + 0.4 * max(len(middles), 5)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize="medium", wrap=True)
    if plot.sizes is None:
        places = list(range(len(middles), 0, -1))
        axes.barh(places, middles, xerr=spread, color="tab:blue", ecolor="black")
        axes.set_yticks(places, list(plot.bars))
        axes.set_xlabel(plot.unit)
    else:
        meaning, sizes = plot.sizes
        axes.errorbar(sizes, middles, yerr=spread, marker="o", capsize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
        axes.set_xlabel(meaning)
        axes.set_ylabel(plot.unit)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    return None
