"""Attach the lanes of a batch to their servers, in one thread.

With a thread for each lane, hundreds of threads would compete for Python's interpreter
lock, which takes more CPU time than attaching.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from typing import Final

from envserve.client.link.zmq_guards.wakeup import Waker

#: Minimum pause between two checks. A check calls the functions of all lanes, because
#: the descriptor of a lane does not become readable when a timeout of the lane expires.
_CHECK_SECONDS: Final = 0.05
#: Minimum ratio of the pause to the duration of the last check, which limits the CPU
#: time of checks.
_PAUSE_RATIO: Final = 10


class Attacher:
    """Attaches lanes in a thread, which ends when no lane is left. Thread-safe."""

    def __init__(self) -> None:
        #: For each lane, a function that continues to attach the lane without blocking,
        #: and returns whether attaching has ended.
        self._lanes: dict[Waker, Callable[[], bool]] = {}
        self._selector: selectors.BaseSelector | None = None
        self._lock = threading.RLock()

    def add(self, waker: Waker, attach: Callable[[], bool]) -> None:
        """Call `attach` when `waker` is readable, and in each regular check.

        Stop once `attach` has returned True.
        """
        with self._lock:
            if (selector := self._selector) is None:
                selector = selectors.DefaultSelector()
                threading.Thread(
                    target=self._run, args=(selector,), name="attacher", daemon=True
                ).start()
                self._selector = selector
            self._lanes[waker] = attach
            selector.register(waker, selectors.EVENT_READ)

    def remove(self, waker: Waker) -> None:
        """Remove a lane, so that its function is not called again; idempotent."""
        with self._lock:
            if self._lanes.pop(waker, None) and self._selector is not None:
                self._selector.unregister(waker)

    def _run(self, selector: selectors.BaseSelector) -> None:
        next_check_at = time.monotonic() + _CHECK_SECONDS
        while True:
            seconds = next_check_at - time.monotonic()
            readable = {key.fileobj for key, _ in selector.select(max(0.0, seconds))}
            with self._lock:
                lanes = list(self._lanes.items())
            began_at = time.monotonic()
            if not (is_check := began_at >= next_check_at):
                lanes = [lane for lane in lanes if lane[0] in readable]
            for waker, attach in lanes:
                if attach():
                    self.remove(waker)
            if is_check:
                now = time.monotonic()
                pause = max(_CHECK_SECONDS, _PAUSE_RATIO * (now - began_at))
                next_check_at = now + pause
            with self._lock:
                if not self._lanes:
                    self._selector = None
                    selector.close()
                    return
