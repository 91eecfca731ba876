"""`ppo plot`: curves of runs over env steps."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ppo.commands.shared import reported_errors

__all__ = ["plot"]


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Image to write, such as curves.png.")
    ],
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="What to draw, of metrics.jsonl.")
    ] = "mean_return",
) -> None:
    """Draw the return of runs over env steps, one curve per config.

    Runs that only differ in their seed become one curve: mean and standard deviation.
    """
    from ppo.plot import draw_curves, read_curves

    with reported_errors():
        curves = read_curves(runs, metric)
        draw_curves(curves, metric, out)
        Console().print(f"Plot: {out}", soft_wrap=True)
