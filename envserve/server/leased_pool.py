"""The pool of one lease, watched by the server's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from envserve.pool.pool import Pool


class LeasedPool:
    """A lease's pool, with its file descriptor and its timer in the event loop.

    Attributes:
      pool: The pool.
      is_ready_reported: Whether the session was notified that the pool is ready.
      is_closing: Whether `begin_close` was called.
    """

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, on_event: Callable[[], None]
    ) -> None:
        self.pool = pool
        self.is_ready_reported = self.is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # infinity if no timer is set
        self._started_at = time.monotonic()
        self._loop = loop
        self._on_event = on_event

    def watch(self) -> None:
        """Start calling `on_event` at events and deadlines of the pool."""
        self._loop.add_reader(self.pool.fileno(), self._on_event)
        self._set_timer(time.monotonic())

    def schedule(self) -> None:
        """Advance the timer to the pool's next deadline, if the deadline is earlier."""
        deadline = self.pool.next_deadline()
        if deadline < self._timer_at:
            self._set_timer(deadline)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._on_event()

    def statistics(self) -> dict[str, float]:
        """Return the counts that are logged when the lease ends."""
        metrics, seconds = self.pool.metrics, time.monotonic() - self._started_at
        return {
            "env_steps": metrics.num_env_steps,
            "seconds": seconds,
            "steps_per_second": metrics.num_env_steps / seconds,
            "num_faults": sum(metrics.faults),
        }

    def begin_close(self, timeout_seconds: float) -> None:
        """Begin to close the pool; workers are killed after the timeout."""
        self.is_closing = True
        self.pool.begin_close(timeout_seconds)
        self._set_timer(time.monotonic())

    def release(self) -> None:
        """Stop watching the pool, and kill its workers if they have not exited."""
        self._loop.remove_reader(self.pool.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self.pool.begin_close(0.0)  # do not wait in the event loop
        self.pool.close()
