"""The pool of one lease, looked after in the server's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from envserve.pool.pool import Pool


class LeasedPool:
    """A lease's pool in the event loop.

    Attributes:
      pool: The pool.
      is_announced: Whether its being ready was reported.
      is_ending: Whether it was told to close.
      timer_at: When to look after it though it has said nothing; maybe infinity.
    """

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, on_event: Callable[[], None]
    ) -> None:
        self.pool = pool
        self.is_announced = self.is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self.timer_at = math.inf
        self._begun_at = time.monotonic()
        self._loop = loop
        self._on_event = on_event

    def watch(self) -> None:
        """Begins to look after it."""
        self._loop.add_reader(self.pool.fileno(), self._on_event)
        self._set_timer(time.monotonic())

    def plan(self) -> None:
        """Set the timer for the pool's next deadline, unless it is set earlier."""
        deadline = self.pool.next_deadline()
        if deadline is not None and deadline < self.timer_at:
            self._set_timer(deadline)

    def _set_timer(self, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.timer_at = instant
        self._timer = self._loop.call_at(instant, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self.timer_at = None, math.inf
        self._on_event()

    def statistics(self) -> dict[str, float]:
        """Return counts of its envs, for the log line at its end."""
        tally, seconds = self.pool.metrics, time.monotonic() - self._begun_at
        return {
            "env_steps": tally.num_env_steps,
            "seconds": seconds,
            "steps_per_second": tally.num_env_steps / seconds,
            "num_faults": sum(tally.faults),
        }

    def begin_close(self, seconds: float) -> None:
        """Has the pool close, within so many seconds."""
        self.is_ending = True
        self.pool.begin_close(seconds)
        self._set_timer(time.monotonic())

    def release(self) -> None:
        """Watch the pool no more; end a pool that is not closed yet by force."""
        self._loop.remove_reader(self.pool.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self.pool.close()
