"""Plots of benchmarks: bars with their lowest and highest, or lines over a size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envserve.bench.turns import Measurements, Number

__all__ = ["Plot", "save_plot"]


@dataclass(frozen=True)
class Plot:
    """What to draw.

    Attributes:
      unit: What the numbers are.
      number: Which number of each case.
      sizes: Where given, the cases stand along an axis of this meaning and these
        positions instead, joined by a line.
    """

    unit: str
    number: Number
    sizes: tuple[str, Sequence[float]] | None = None


def save_plot(plot: Plot, measured: Measurements, title: str, path: Path) -> str | None:
    """Draws to a PNG file; returns why not, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        return f"{error}; pip install 'envserve[bench]'"
    values = [measured.values(case, plot.number) for case in measured.by_case]
    middles = [statistics.median(each) for each in values]
    pairs = list(zip(middles, values, strict=True))
    below, above = [m - min(v) for m, v in pairs], [max(v) - m for m, v in pairs]
    figure = Figure(figsize=(8, 1.5 + 0.4 * max(len(middles), 5)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize="medium", wrap=True)
    if plot.sizes is None:
        places = list(range(len(middles), 0, -1))
        spread = [below, above]
        axes.barh(places, middles, xerr=spread, color="tab:blue", ecolor="black")
        axes.set_yticks(places, list(measured.by_case))
        axes.set_xlabel(plot.unit)
    else:
        meaning, sizes = plot.sizes
        axes.errorbar(sizes, middles, yerr=[below, above], marker="o", capsize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
        axes.set_xlabel(meaning)
        axes.set_ylabel(plot.unit)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    return None
