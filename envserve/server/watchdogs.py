"""The process of a server: its signals and limits, its lag, what connections take."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self

__all__ = ["ConnectionWatch", "LoopLag", "StopSignals", "keep_from_envs"]

_LOGGER: Final = logging.getLogger(__name__)
_TICK_SECONDS: Final = 0.5
_NUM_TICKS: Final = 20
_PR_SET_DUMPABLE: Final = 4
_STATM: Final = "/proc/self/statm"
_WATCH_SECONDS: Final = 0.25
#: How long there may be no free descriptor: who says nothing may be gone by himself.
#: Twice as long each time in a row, since the others are cut off too.
_SHORT_SECONDS: Final = 1.0
_MAX_SHORT_SECONDS: Final = 16.0


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


def keep_from_envs(worker_user: str) -> None:
    """Keeps other processes of this user from our memory, and says what it cannot."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0):
        _LOGGER.warning("envs can read this process's memory: prctl has failed")
    text = f"{worker_user}: envs cannot read the key files of this server's user"
    if not worker_user:
        text = (
            "this server's user: envs can read all of its files, key files as well; "
            "--worker-user keeps them apart"
        )
    _LOGGER.info("workers run as %s", text)


class ConnectionWatch:
    """Has all connections closed when they take too much of this process.

    What ZeroMQ holds for peers has no bound of its own. Rows of leases are shared
    memory, which does not count; copies of them that are on their way do.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        recycle: Callable[[str, bool], None],
        most: Callable[[], int],
    ) -> None:
        """Begins to look, four times a second.

        `recycle` closes all connections; it is told why, and whether it is for their
        number. Memory may grow by `most` bytes over the least since then.
        """
        self._loop = loop
        self._recycle = recycle
        self._most = most
        self._least_bytes = self._short_since = math.inf
        self._may_be_short = _SHORT_SECONDS
        self._recycled_at = -math.inf
        # Now: when it matters there may be no descriptor left.
        self._statm = os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else -1
        self._timer = self._plan()

    def stop(self) -> None:
        """Looks no more."""
        self._timer.cancel()
        if self._statm >= 0:
            os.close(self._statm)

    def _plan(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_WATCH_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = self._plan()
        if self._least_bytes == math.inf:  # what was closed has freed all by now
            _give_memory_back()
        now, used = self._loop.time(), self._own_bytes()
        self._least_bytes = min(self._least_bytes, used)
        growth = used - self._least_bytes
        is_short = not _has_free_descriptor()
        self._short_since = min(self._short_since, now) if is_short else math.inf
        if growth > self._most():
            why = f"memory has grown by {growth / 2**20:.0f} MiB (--max-buffered-mib)"
            is_of_number = False
        elif now - self._short_since >= self._may_be_short:
            why = "they have taken all descriptors (ulimit -n)"
            is_of_number = True
            self._may_be_short = min(2 * self._may_be_short, _MAX_SHORT_SECONDS)
        else:
            if now - self._recycled_at > 2 * _MAX_SHORT_SECONDS:
                self._may_be_short = _SHORT_SECONDS
            return
        self._least_bytes = self._short_since = math.inf
        self._recycled_at = now
        self._recycle(why, is_of_number)

    def _own_bytes(self) -> int:
        """Returns how much memory this process does not share; 0 where unknown."""
        if self._statm < 0:
            return 0
        _, resident, shared, *_ = map(int, os.pread(self._statm, 128, 0).split())
        return (resident - shared) * resource.getpagesize()


def _give_memory_back() -> None:
    """Gives to the system what is free; glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _has_free_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True
