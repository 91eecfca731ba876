"""Watches the server's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

_TICK_SECONDS: Final = 0.5
_NUM_TICKS: Final = 20


class LoopLag:
    """How late the event loop has been lately, which who asks now and then cannot see.

    Looks twice a second how late it is called; remembers 10 s.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: deque[float] = deque(maxlen=_NUM_TICKS)
        self._timer = self._plan()

    @property
    def seconds(self) -> float:
        """The longest lag of late, or of the look that is overdue."""
        overdue = self._loop.time() - self._timer.when()
        return max(0.0, overdue, *self._lags)

    def stop(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _plan(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._lags.append(self._loop.time() - self._timer.when())
        self._timer = self._plan()
