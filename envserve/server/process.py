"""The process of a server: its signals, its limits, and how late its loop is."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, Self

__all__ = ["LoopLag", "StopSignals", "raise_file_limit"]

_LOGGER: Final = logging.getLogger(__name__)
_TICK_SECONDS: Final = 0.5
_NUM_TICKS: Final = 20


class StopSignals:
    """While entered, notes SIGTERM and SIGINT instead of dying of them.

    SIGTERM asks for a drain, once; SIGINT, or a second SIGTERM, for an end at once.

    Attributes:
      asked: Set by the first signal.
      at_once: Set by one that leaves no time for a drain.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self._loop = loop

    def __enter__(self) -> Self:
        self._loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        self._loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    async def wait_for(
        self, work: Coroutine[Any, Any, None], timeout_seconds: float
    ) -> bool:
        """Waits for work; cancels it at the timeout, or when there is no time left.

        Returns:
          Whether the work was done.
        """
        task = asyncio.create_task(work)
        signalled = asyncio.create_task(self.at_once.wait())
        try:
            await asyncio.wait(
                (task, signalled),
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_done = task.done()
        finally:
            task.cancel()
            signalled.cancel()
        if is_done:
            task.result()
        return is_done

    def _on_terminate(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def _on_interrupt(self) -> None:
        self.at_once.set()
        self.asked.set()


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


def raise_file_limit() -> None:
    """Allows as many open files as may be: every worker and client needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: "unlimited" is more than it gives
        _LOGGER.info("the limit of %d open files stays: %s", soft, error)
