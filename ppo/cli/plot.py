"""The command `ppo plot`: plot the learning curves of runs."""

import os
from pathlib import Path
from typing import Annotated

from envserve.cli.program import Option
from ppo.cli.options import report_errors, run_folders
from ppo.errors import OutputError


def plot(
    runs: Annotated[list[Path], Option(metavar="RUN", values=run_folders)],
    *,
    out: Path | None = None,
    metric: str = "mean_return",
) -> None:
    """Plot a metric over env steps, one curve per config.

    Runs whose configs differ only in the seed share a curve, with its mean and
    standard deviation.

    Args:
      runs: Run folders of `ppo train`; with --seeds, also the folder of all seeds.
      out: Image file to write; by default, METRIC.png in the run folder, or in the
        folder that contains all runs.
      metric: Metric to plot, a key of metrics.jsonl.
    """
    from ppo.evaluation.plot import draw_curves, read_curves

    with report_errors():
        curves = read_curves(runs, metric)
        if out is None:
            paths = map(os.path.abspath, runs)
            folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([*paths]))
            out = folder / f"{metric.replace('/', '_')}.png"
        elif os.path.islink(out):
            # Write to the file that the user's link names. Unlike `Path.resolve`,
            # `realpath` accepts a link to itself.
            out = Path(os.path.realpath(out))
        if out.name in ("", ".."):
            raise OutputError(
                f"{out}: expected a writable image file, for example curves.png; got a "
                "folder."
            )
        out = out if out.suffix else out.with_suffix(".png")
        draw_curves(curves, metric, out)
        print(f"Plot: {out}")
