"""The pool of one lease, looked after in the server's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from envserve.pool.pool import Pool

__all__ = ["LeasedPool"]


class LeasedPool:
    """A lease's pool in the event loop.

    Attributes:
      pool: The pool.
      is_announced: Whether its being ready was reported.
      is_ending: Whether it was told to close.
      timer_at: When to look after it though it has said nothing; maybe infinity.
    """

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, on_news: Callable[[], None]
    ) -> None:
        self.pool = pool
        self.is_announced = self.is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self.timer_at = math.inf
        self._begun_at = time.monotonic()
        self._loop = loop
        self._on_news = on_news

    def watch(self) -> None:
        """Begins to look after it."""
        self._loop.add_reader(self.pool.fileno(), self._on_news)
        self.look_at(time.monotonic())

    def look_at(self, instant: float) -> None:
        """Sets the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self.timer_at = instant
        self._timer = self._loop.call_at(instant, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self.timer_at = None, math.inf
        self._on_news()

    def account(self) -> dict[str, float]:
        """Returns what its envs have done, for the line of a log that tells its end."""
        metrics, seconds = self.pool.metrics, time.monotonic() - self._begun_at
        return {
            "env_steps": metrics.num_env_steps,
            "seconds": seconds,
            "steps_per_second": metrics.num_env_steps / seconds,
            "num_faults": sum(metrics.faults),
        }

    def begin_close(self, seconds: float) -> None:
        """Has the pool close, within so many seconds."""
        self.is_ending = True
        self.pool.begin_close(seconds)
        self.look_at(time.monotonic())

    def release(self) -> None:
        """Looks after it no more; ends a pool that is not closed yet by force."""
        self._loop.remove_reader(self.pool.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self.pool.close()
