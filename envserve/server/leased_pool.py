"""A lease's pool in the event loop: its descriptor, its deadlines, its stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from envserve.errors import EnvserveError
from envserve.lane import Outcome
from envserve.pool.pool import Pool

__all__ = ["LeasedPool"]


class LeasedPool:
    """Calls back whenever the pool may have something, until it is closed.

    Attributes:
      pool: The pool.
      is_announced: Whether its being ready, or having failed, was reported.
    """

    def __init__(
        self,
        pool: Pool,
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[], None],
    ) -> None:
        """Begins to watch."""
        self.pool = pool
        self.is_announced = False
        self._loop = loop
        self._on_event = on_event
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(pool.fileno(), on_event)
        self.plan()

    def collect(self) -> tuple[list[Outcome], EnvserveError | None]:
        """Returns what has ended, and why the pool has failed, if it has."""
        try:
            finished = self.pool.collect(0)
        except EnvserveError as error:  # no process can be started any more
            return [], error
        return finished, self.pool.error

    def plan(self) -> None:
        """Sets the timer, unless it will fire early enough anyway."""
        deadline = self.pool.next_deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._on_event()

    def stop(self) -> None:
        """Stops watching, and lets go of a pool that is closed."""
        self._loop.remove_reader(self.pool.fileno())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.pool.close()

    def __repr__(self) -> str:
        return f"<LeasedPool {self.pool!r}>"
