"""Handles SIGTERM, SIGHUP and SIGINT, which request a drain or an immediate stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Self

from envserve.python_process import stop_signals


class ShutdownSignals:
    """Context manager that turns SIGTERM, SIGHUP and SIGINT into events.

    The first SIGTERM requests a drain, and so does SIGHUP; SIGINT or a second SIGTERM
    requests an immediate stop.

    Attributes:
      requested: Set by the first signal of any kind.
      immediate: Set when the server should stop without a drain.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()
        self._loop = loop
        self._is_terminated = False  # whether a SIGTERM has arrived

    def __enter__(self) -> Self:
        self._loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        self._loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        if signal.SIGHUP in stop_signals():
            self._loop.add_signal_handler(signal.SIGHUP, self.requested.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    async def run_unless_immediate(
        self, coroutine: Coroutine[Any, Any, None], timeout_seconds: float
    ) -> bool:
        """Run a coroutine until the timeout, or until `immediate` is set.

        Return whether it has finished; otherwise, cancel it.
        """
        task = asyncio.create_task(coroutine)
        signalled = asyncio.create_task(self.immediate.wait())
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
        if self._is_terminated:
            self.immediate.set()
        self._is_terminated = True
        self.requested.set()

    def _on_interrupt(self) -> None:
        self.immediate.set()
        self.requested.set()
