"""SIGTERM and SIGINT of a server: a drain, or an end at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Self


class ShutdownSignals:
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
