"""SIGINT and SIGTERM as a polite request, with a way out for the impatient."""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopSignals:
    """While entered, notes the first SIGINT or SIGTERM instead of dying of it.

    A second signal raises `KeyboardInterrupt`, in the main thread as soon as that runs
    Python, and in whoever calls `check`. While the main thread is inside TensorFlow,
    Python handles no signal, so a thread of its own listens to them.

    Args:
        on_first: called at once when the first signal comes, in that thread.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._is_impatient = False
        self._reader, self._writer = socket.socketpair()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers; only the main thread may."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        self._writer.setblocking(False)
        self._previous_descriptor = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._writer.close()
        self._listener.join()
        self._reader.close()

    def has_fired(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if a second signal has come; from any thread."""
        if self._is_impatient:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """Take in the number of each signal, one byte, until the writer is closed."""
        count = 0
        while number := self._reader.recv(1):
            count += number[0] in self._previous
            if count == 1:
                self._on_first()
            elif count > 1:
                self._is_impatient = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Two signals during one call of TensorFlow arrive here as one.
        if self.received is not None or self._is_impatient:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
