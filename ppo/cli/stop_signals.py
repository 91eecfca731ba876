"""Stop gracefully at the first signal, and immediately at the second.

The signals are SIGINT, SIGTERM and SIGHUP. A closed terminal sends SIGHUP, often twice.
Therefore, SIGHUP never counts as the second signal. If it is ignored when the command
starts (`nohup`), it stays ignored.

After the first signal, training completes its iteration. If the envs do not reply, the
iteration is abandoned instead: the listener thread sends the signal again to the main
thread, whose handler raises `TrainingStopped`.
"""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from envserve.python_process import stop_signals
from ppo.errors import TrainingStopped


class StopSignals:
    """Context manager that records the first SIGINT, SIGTERM or SIGHUP.

    A second signal other than SIGHUP raises `KeyboardInterrupt` in the main thread, as
    soon as it runs Python code, and in any thread that calls `check`. Python runs no
    signal handler while the main thread is inside TensorFlow, so a listener thread also
    receives the signals.

    Args:
      on_first: Called in the listener thread when the first signal arrives.
      is_waiting: Returns whether the main thread is waiting for envs.
      stalled_seconds: If no batch step has ended for this time after the first
        signal, and the main thread is waiting for envs, `TrainingStopped` is raised
        in the main thread.

    Attributes:
      received: The first signal, or None.
    """

    def __init__(
        self,
        on_first: Callable[[], None] = lambda: None,
        is_waiting: Callable[[], bool] = lambda: False,
        stalled_seconds: float = 5.0,
    ) -> None:
        self._on_first, self._is_waiting = on_first, is_waiting
        self._stalled_seconds = stalled_seconds
        self._must_stop = self._must_stop_now = False
        self._has_stepped = self._is_stalled = self._has_raised = False
        self._reader, self._writer = socket.socketpair()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers; must be called in the main thread."""
        for number in stop_signals():
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
        """Record a batch step; raise `KeyboardInterrupt` after a second signal.

        This method is thread-safe.
        """
        if self._must_stop:
            self._has_stepped = True
            if self._must_stop_now:
                raise KeyboardInterrupt

    def _listen(self) -> None:
        """Read the numbers of received signals, until the writing socket is closed."""
        count, first = 0, 0
        while True:
            try:
                number = self._reader.recv(1)
            except TimeoutError:
                is_stalled = self._is_waiting() and not self._has_stepped
                if is_stalled and not self._has_raised:
                    self._is_stalled = True
                    count -= 1  # the signal that is sent here is not a second one
                    signal.pthread_kill(threading.main_thread().ident or 0, first)
                self._has_stepped = False
                continue
            if not number:
                return
            if number[0] in self._previous and (
                not count or number[0] != signal.SIGHUP
            ):
                count += 1
            self._must_stop = self._must_stop or count > 0
            if count == 1 and not first:
                first = number[0]
                self._on_first()
                self._reader.settimeout(self._stalled_seconds)
            elif count > 1:
                self._must_stop_now = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_stalled:
            self._is_stalled = False
            # If the step has ended in the meantime, an update must not be interrupted.
            if self._is_waiting():
                self._has_raised = True  # only once, because the run is saved next
                raise TrainingStopped("the envs do not reply")
            return
        # If two signals arrive during one TensorFlow call, Python calls this handler
        # only once. Therefore, the listener thread counts signals too.
        if self.received is not None or self._must_stop_now:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
