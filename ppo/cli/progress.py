"""Show the phases and the progress of a run.

A terminal is redrawn four times per second, even while TensorFlow is busy. Without a
terminal, a line is printed per phase and every ten seconds.
"""

import contextlib
import datetime
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Self, cast

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from envserve.text import printable, rounded

if TYPE_CHECKING:
    from ppo.train import Progress

_TRAINING = "training"
#: Minimum and maximum width of a bar or sparkline, and the gap between cells, in
#: columns.
_MIN_WIDTH, _MAX_WIDTH, _GAP = 8, 40, 2
#: Training is shown as stalled if an iteration takes more than three times as long as
#: the mean iteration, plus this number of seconds.
_STALLED_SECONDS = 10.0
_METRICS = ("value_loss", "policy_loss", "entropy")


class _FaultTolerantStream:
    """A stream that ignores write errors, so that they do not abort a run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""


class Screen:
    """Context manager that shows the current phase and progress of a command.

    Args:
      console: Console to print to.
      logger: Logger to use instead of the console, one record per line.
      seconds_between_lines: Seconds between progress lines if there is no terminal.

    Attributes:
      total_steps: Number of env steps after which training ends.
    """

    def __init__(
        self,
        console: Console,
        logger: logging.Logger | None = None,
        *,
        seconds_between_lines: float = 10.0,
    ) -> None:
        self.total_steps = 0
        console.file = cast(IO[str], _FaultTolerantStream(console.file))
        self._console, self._logger = console, logger
        self._is_live = console.is_interactive and logger is None
        self._has_unicode = not console.options.ascii_only
        self._seconds_between_lines = seconds_between_lines
        self._phase, self._is_transient = "", True
        self._activity: Callable[[], str] = lambda: ""
        self._began = self._training_began = 0.0
        self._progress: Progress | None = None
        # Time in seconds and env steps of the first and the last progress report.
        self._first = self._last = (0.0, 0)
        self._num_reports = 0
        self._is_learning = False
        self._returns: list[float] = []
        self._spinner = Spinner("dots" if self._has_unicode else "line", style="cyan")
        self._is_closed = threading.Event()
        self._ticker = threading.Thread(target=self._print_lines, daemon=True)
        self._live = Live(
            console=console,
            get_renderable=self._rows,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # leave stderr alone if it is a file
        )

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        else:
            self._ticker.start()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        self._end_phase(is_finished=exception_type is None)
        self._is_closed.set()
        if self._is_live:
            self._live.stop()
        else:
            self._ticker.join()

    def phase(
        self,
        name: str,
        *,
        is_transient: bool = False,
        activity: Callable[[], str] = lambda: "",
    ) -> None:
        """End the current phase, and start another one unless `name` is empty.

        Args:
          name: Name of the phase.
          is_transient: Whether the line of the phase is removed when the phase ends.
          activity: Returns the current activity within the phase, to show with it.
        """
        self._end_phase(is_finished=not is_transient)
        self._phase, self._is_transient = printable(name), is_transient
        self._activity = activity
        self._began = time.monotonic()
        if name and not self._is_live and not is_transient:
            self.print(f"{name} ...")

    def rename(self, name: str) -> None:
        """Rename the current phase without restarting its clock."""
        self._phase = printable(name)

    def show(self, progress: "Progress") -> None:
        """Show the training progress."""
        self._last = time.monotonic(), progress.steps
        self._num_reports += 1
        is_first, self._progress = self._progress is None, progress
        if is_first:
            self._end_phase(is_finished=True)
            self._training_began = self._last[0]
        if is_first or not self._is_learning:
            # Restart the estimate of the time left at the first update: SAC begins with
            # iterations without updates, which take much less time.
            has_losses = any(name in progress.metrics for name in _METRICS)
            if is_first or has_losses:
                self._first, self._num_reports = self._last, 1
            self._is_learning = has_losses
        self._phase, self._is_transient = _TRAINING, False
        self._activity = lambda: ""
        self._began = self._training_began
        if not math.isnan(progress.mean_return):
            self._returns.append(progress.mean_return)
        if is_first and not self._is_live:
            self.print(self._line())

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line above the part that is redrawn; escape control characters."""
        text = printable(text)  # it may contain names or output of a stranger's run
        if self._logger is None:
            self._console.print(text, style=style, markup=False, soft_wrap=True)
        else:
            fields: dict[str, Any] = {}
            if self._progress is not None and self._phase == _TRAINING:
                fields = self._progress._asdict()
                fields |= fields.pop("metrics")
            # JSON has neither NaN nor infinity.
            known = {k: v for k, v in fields.items() if math.isfinite(v)}
            self._logger.info(text.strip(), extra={"fields": known})

    def _end_phase(self, *, is_finished: bool) -> None:
        """End the current phase; print its line if it is finished and not transient."""
        name, is_finished = self._phase, is_finished and not self._is_transient
        duration = _duration(time.monotonic() - self._began)
        if is_finished and self._progress is not None and name == _TRAINING:
            timing, results = self._cells(self._progress)
            curve = sparkline(self._returns, 16) if self._has_unicode else ""
            self.print(
                f"{name}, {duration}: {timing[1]}, {results[0]} {curve}".rstrip()
            )
        elif is_finished and name and self._is_live:
            self.print(f"{name}, {duration}", style="dim")
        self._phase = ""

    def _print_lines(self) -> None:
        while not self._is_closed.wait(self._seconds_between_lines):
            if self._phase:
                self.print(self._line())

    def _line(self) -> str:
        if self._progress is None or self._phase != _TRAINING:
            duration = _duration(time.monotonic() - self._began)
            return f"{self._name()}, {duration} so far"
        (time_left, *timing), results = self._cells(self._progress)
        return ", ".join((*timing, *results, time_left))

    def _name(self) -> str:
        activity = self._activity()
        return f"{self._phase}: {activity}" if activity else self._phase

    def _cells(self, progress: "Progress") -> tuple[list[str], list[str]]:
        """Return a list of texts about time and steps, and a list about results.

        The most important texts come first. The first list begins with the time left
        and the number of env steps.
        """
        (start, first), (last, steps) = self._first, self._last
        time_left, speed = "? left", progress.steps_per_second
        if steps > first:
            seconds = (self.total_steps - steps) * (last - start) / (steps - first)
            idle, usual = time.monotonic() - last, (last - start) / self._num_reports
            time_left = f"{_duration(max(seconds - idle, 0.0))} left"
            if idle > _STALLED_SECONDS + 3 * usual:  # the envs may be unavailable
                time_left, speed = f"no progress for {_duration(idle)}", 0.0
        timing = [
            time_left,
            f"{steps:,}/{self.total_steps:,} steps",
            f"{speed:,.0f} steps/s",
        ]
        mean = progress.mean_return
        results = [f"return {'-' if math.isnan(mean) else rounded(mean)}"]
        if progress.lost_steps:
            results.append(f"{progress.lost_steps:,} lost")
        metrics = progress.metrics
        if masked := metrics.get("nonfinite_episodes"):
            results.append(f"{masked:.0f} episodes with NaN or infinity")
        for name in filter(metrics.__contains__, _METRICS):
            results.append(f"{name.replace('_', ' ')} {metrics[name]:.2g}")
        return timing, results

    def _rows(self) -> RenderableType:
        if not self._phase:
            return ""
        name = f"{self._name()} {_duration(time.monotonic() - self._began)}"
        self._spinner.update(text=Text(name))  # a str could contain markup
        # An evaluation during training is transient.
        is_training = self._phase == _TRAINING or self._is_transient
        if self._progress is None or not is_training:
            return self._spinner
        timing, results = self._cells(self._progress)
        steps, width = self._progress.steps, self._console.width

        def bar(columns: int) -> RenderableType:
            return ProgressBar(self.total_steps, steps, width=columns)

        def curve(columns: int) -> RenderableType:
            glyphs = sparkline(self._returns, columns) if self._has_unicode else ""
            return Text(glyphs.ljust(columns), "green")

        return Group(
            _row(self._spinner, len(name) + 2, bar, timing, width),
            _row(Text(results[0], "bold"), len(results[0]), curve, results[1:], width),
        )


def _row(
    lead: RenderableType,
    lead_width: int,
    graphic: Callable[[int], RenderableType],
    cells: Sequence[str],
    width: int,
) -> Table:
    """Lay out a row of at most `width` columns; drop the last cells if it is too long.

    `graphic` returns a bar or a sparkline with the given number of columns.
    """
    remaining = list(cells)
    available = width - lead_width - _GAP

    def needed() -> int:
        return _MIN_WIDTH + sum(cell_len(cell) + _GAP for cell in remaining)

    while remaining and needed() > available:
        remaining.pop()
    columns = max(min(available - needed() + _MIN_WIDTH, _MAX_WIDTH), 1)
    row = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    row.add_row(lead, graphic(columns), *remaining)
    return row


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return numbers as a line of `columns` bar characters, scaled to their range."""
    ends = [-(-(i + 1) * len(values) // columns) for i in range(columns)]
    shown = [values[end - 1] for end in ends if values]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    heights = [(value - low) / (high - low) if high > low else 0.0 for value in shown]
    return "".join("▁▂▃▄▅▆▇█"[round(7 * height)] for height in heights)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    longest = datetime.timedelta.max // datetime.timedelta(seconds=1)
    return str(datetime.timedelta(seconds=min(int(seconds), longest)))
