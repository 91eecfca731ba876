"""A thread that injects faults at random moments while another thread steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Self


class FaultInjector:
    """A context manager that runs faults one after another in its own thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="fault injector", daemon=True
        )
        self._thread.start()

    def inject(self, delay_seconds: float, fault: Callable[[], None]) -> None:
        """Run a fault after a delay; raise an earlier fault's exception, if any."""
        if self._error is not None:
            raise self._error
        self._queue.put((delay_seconds, fault))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            delay, fault = item
            time.sleep(delay)  # so that the fault occurs at a random point of a step
            try:
                fault()
            except BaseException as error:
                self._error = error
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
