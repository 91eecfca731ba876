"""A thread that makes faults at random instants, while another one steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Self


class FaultInjector:
    """Carries out what it is told to, one after the other; a context manager."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="injector", daemon=True)
        self._thread.start()

    def strike(self, delay_seconds: float, act: Callable[[], None]) -> None:
        """Has something done after a delay; raises what an earlier one has raised."""
        if self._error is not None:
            raise self._error
        self._orders.put((delay_seconds, act))

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            delay, act = order
            time.sleep(delay)  # the phase of the fault, which is drawn
            try:
                act()
            except BaseException as error:
                self._error = error
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
