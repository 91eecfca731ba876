"""Threads of a worker that reset some of its envs while it steps others.

An env is handed over with its reset, and is the caller's again when the future is done.
Resets begin in the order in which they were handed over.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

__all__ = ["ResetThreads"]

#: More would only get in the way of the stepping thread when resets need the processor.
_MAX_THREADS: Final = 16
#: How soon a reset that computes gives way to the stepping thread.
_SWITCH_SECONDS: Final = 0.5e-3
#: How long closing waits for resets that run; the pool's patience is twice that.
_CLOSE_SECONDS: Final = 0.5

Info = Mapping[str, Any]
_Item = tuple[Future[Info], Callable[[], Info]]


class ResetThreads:
    """A fixed number of threads, and a queue of resets for them."""

    def __init__(self, num_envs: int) -> None:
        """Starts a thread per env that may be reset at a time, or as many as help."""
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"reset-{index}", daemon=True)
            for index in range(min(num_envs, _MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, reset: Callable[[], Info]) -> Future[Info]:
        """Has a thread call this; the future holds what it returns or raises."""
        future: Future[Info] = Future()
        self._queue.put((future, reset))
        return future

    def close(self) -> None:
        """Drops what has not begun, and waits a moment for what has."""
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        give_up_at = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        sys.setswitchinterval(self._switch_seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, reset = item
            try:
                info = reset()
            # SystemExit too: it ends the worker once somebody waits for this env.
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(info)
            del item, future  # else an idle thread would keep the last env alive

    def __repr__(self) -> str:
        """Returns the number of threads."""
        return f"<ResetThreads, {len(self._threads)}>"
