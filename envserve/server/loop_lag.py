"""Measures how late the server's event loop runs its callbacks."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

_TICK_SECONDS: Final = 0.5
_NUM_TICKS: Final = 20


class LoopLag:
    """The lag of an event loop over the last 10 s.

    A callback that is scheduled every 0.5 s records its own delay. Occasional requests
    could not measure the lag, because a hanging loop does not process them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: deque[float] = deque(maxlen=_NUM_TICKS)
        self._timer = self._schedule()

    @property
    def seconds(self) -> float:
        """The largest recorded lag, including the lag of the pending callback."""
        overdue = self._loop.time() - self._timer.when()
        return max(0.0, overdue, *self._lags)

    def stop(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _schedule(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._lags.append(self._loop.time() - self._timer.when())
        self._timer = self._schedule()
