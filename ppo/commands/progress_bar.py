"""How far a run is, on a terminal as a bar, elsewhere as a line now and then."""

import math
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

__all__ = ["ProgressBar"]

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Shows steps, steps per second and the mean return of recent episodes.

    Args:
        console: where to show it.
        total_steps: steps at which the bar is full.
    """

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._last_line = -math.inf
        self._bar = RichProgress(
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("return {task.fields[mean_return]}{task.fields[lost]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stderr=sys.stderr.isatty(),  # a log file gets its own lines
        )
        self._task = self._bar.add_task(
            "train", total=total_steps, speed="compiling", mean_return="-", lost=""
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing; the last state stays visible."""
        self._bar.stop()

    def show(
        self,
        steps: int,
        steps_per_second: float,
        mean_return: float,
        lost_steps: int = 0,
    ) -> None:
        """Show a new state; `mean_return` is NaN while no episode has ended."""
        shown_return = "-" if math.isnan(mean_return) else f"{mean_return:.1f}"
        speed = f"{steps_per_second:,.0f} steps/s"
        lost = f", {lost_steps:,} lost" if lost_steps else ""
        self._bar.update(
            self._task,
            completed=steps,
            speed=speed,
            mean_return=shown_return,
            lost=lost,
        )
        if self._console.is_terminal:
            return
        now = time.monotonic()
        is_due = now - self._last_line >= _SECONDS_BETWEEN_LINES
        if is_due or steps >= self._total_steps:
            self._last_line = now
            self._console.print(
                f"{steps:,}/{self._total_steps:,} steps, {speed}, "
                f"return {shown_return}{lost}"
            )
