"""Stop gracefully at the first SIGINT or SIGTERM, and immediately at the second."""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Context manager that records the first SIGINT or SIGTERM.

    A second signal raises `KeyboardInterrupt` in the main thread, as soon as it runs
    Python code, and in any thread that calls `check`. Python runs no signal handler
    while the main thread is inside TensorFlow, so a listener thread also receives the
    signals.

    Args:
        on_first: Called in the listener thread when the first signal arrives.

    Attributes:
        received: The first signal, or None.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._must_stop_now = False
        self._reader, self._writer = socket.socketpair()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers; must be called in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._writer.setblocking(False)
        self._previous_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._writer.close()
        self._listener.join()
        self._reader.close()

    def has_fired(self) -> bool:
        """Return whether a signal has arrived."""
        return self.received is not None

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if a second signal has arrived; thread-safe."""
        if self._must_stop_now:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """Read the numbers of received signals, until the writing socket is closed."""
        count = 0
        while number := self._reader.recv(1):
            count += number[0] in self._previous
            if count == 1:
                self._on_first()
            elif count > 1:
                self._must_stop_now = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # If two signals arrive during one TensorFlow call, Python calls this handler
        # only once. Therefore, the listener thread counts signals too.
        if self.received is not None or self._must_stop_now:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
