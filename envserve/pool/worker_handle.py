"""The pool's side of one worker process: start it, talk to it, learn of its end.

Nothing but `wait` waits. A process has ended when its socket is at end of file; its
exit status follows from the launcher.
"""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from envserve import codec
from envserve.lane import Block
from envserve.pool.launcher import Exit, Launcher
from envserve.settings import PoolSettings
from envserve.slab import Slab
from envserve.worker.channel import Frame, FrameReader, Kind, pack_frame
from envserve.wrappers import plain_wrappers

__all__ = ["KILL_SECONDS", "WorkerHandle"]

#: What a worker needs to know besides, and is plain.
_SETTINGS: Final = (
    *("env_name", "num_envs", "seed", "first_env_index"),
    *("autoreset", "infos", "spare_envs"),
)
#: The exit status and the end of file come one after the other, or one does not come.
_EXIT_STATUS_GRACE_SECONDS: Final = 0.2
#: How long a process that was killed may take to end; the kernel may hold it.
KILL_SECONDS: Final = 5.0


class WorkerHandle:
    """One process of a worker; a restarted worker gets a new handle.

    Attributes:
      is_at_end: Whether its socket is at end of file.
      unsent: What waits until the process has read more, for `flush`.
      killed_for: Why it was killed; else empty.
    """

    def __init__(
        self,
        launcher: Launcher,
        selector: selectors.BaseSelector | None = None,
        owner: object = None,
    ) -> None:
        """Starts the process.

        Args:
          launcher: Forks it.
          selector: Wakes its owner when there is something to `read`, or room to send.
          owner: Data of the selector's key.

        Raises:
          WorkerError: It cannot be started.
        """
        self.is_at_end = False
        self.killed_for = ""
        self._at_end_since = self._killed_at = math.inf
        self._launcher = launcher
        self._selector = selector
        self._owner = owner
        self._reader = FrameReader()
        self.unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._forked, self._socket = launcher.launch()
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if selector is not None:
            selector.register(self._socket, selectors.EVENT_READ, owner)

    @property
    def pid(self) -> int | None:
        """Process id, or None until the launcher has reported it."""
        return self._forked.pid

    @property
    def exit(self) -> Exit | None:
        """How the process ended, or None."""
        return self._forked.exit

    def build(
        self,
        config: PoolSettings,
        worker: int,
        num_workers: int,
        blocks: Sequence[Block],
        incarnations: Sequence[int],
    ) -> None:
        """Tells the process which envs to build."""
        message: dict[str, Any] = {
            **{name: getattr(config, name) for name in _SETTINGS},
            "env_kwargs": dict(config.env_kwargs),
            "wrappers": plain_wrappers(config.wrappers),
            "num_workers": num_workers,
            "worker": worker,
            "blocks": [[block.index, block.start, block.stop] for block in blocks],
            "incarnations": [
                [row, incarnations[row]]
                for block in blocks
                for row in range(block.start, block.stop)
            ],
        }
        self.send(pack_frame(Kind.BUILD, payload=codec.encode(message)))

    def send_slab(self, slab: Slab) -> None:
        """Passes the slab's descriptor on."""
        self.send(pack_frame(Kind.SLAB), slab.fd)

    def send(self, data: bytes, *fds: int) -> None:
        """Sends frames, and descriptors with them, without waiting."""
        if not self.unsent and not fds:
            try:
                sent = self._socket.send(data)
            except OSError:  # full, or at its end: `flush` tells which
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self.unsent.append((data, fds))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now; the selector tells when it takes more."""
        while self.unsent:
            data, fds = self.unsent[0]
            try:
                if fds:
                    sent = socket.send_fds(self._socket, [data], fds)
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                break
            except OSError:
                # It has ended. What it wrote before can still be read, up to its end.
                self.unsent.clear()
                break
            if sent == len(data):
                self.unsent.popleft()
            else:
                self.unsent[0] = (data[sent:], ())
        if self._selector is not None and not self.is_at_end:
            events = selectors.EVENT_READ
            if self.unsent:
                events |= selectors.EVENT_WRITE
            self._selector.modify(self._socket, events, self._owner)

    def read(self) -> list[Frame]:
        """Returns the frames that have come; sends what is left to.

        Raises:
          WorkerError: The process sent something that is no frame.
        """
        if self.unsent:
            self.flush()
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if data:
            return self._reader.feed(data)
        if not self.is_at_end:
            self._unregister()  # else it stays readable until the status is known
            self.is_at_end = True
            self._launcher.poll()
        return []

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `read` has something."""
        self._poll.poll(math.ceil(1000 * timeout_seconds))

    def poll_exit(self) -> Exit | None:
        """Returns how the process ended, if that is known by now."""
        if self.exit is None:
            self._launcher.poll()
        return self.exit

    def wait_exit(self, timeout_seconds: float) -> Exit | None:
        """Waits until it is known how the process ended; None if that takes longer."""
        give_up_at = time.monotonic() + timeout_seconds
        while self.poll_exit() is None and (left := give_up_at - time.monotonic()) > 0:
            self._launcher.wait(left)
        return self.exit

    def has_ended(self, now: float) -> bool:
        """Tells whether the process is no more, and has said all it had to say."""
        if self.poll_exit() is not None or self.is_at_end:
            self._at_end_since = min(self._at_end_since, now)
        # A process that an env has started may hold the socket open for ever.
        return self.exit is not None and (self.is_at_end or self.is_overdue(now))

    def is_overdue(self, now: float) -> bool:
        """Tells whether one sign of its end is there, and the other does not come."""
        return now - self._at_end_since >= _EXIT_STATUS_GRACE_SECONDS

    def kill(self, reason: str, now: float, *, has_stack: bool = False) -> None:
        """Has the process and its children killed; its exit status follows.

        Args:
          reason: Why, for messages.
          now: Monotonic seconds.
          has_stack: Have it write its Python stack to stderr first.
        """
        self.killed_for, self._killed_at = reason, now
        self._launcher.kill(self._forked, has_stack=has_stack)

    def cannot_be_killed(self, now: float) -> bool:
        """Tells whether it was killed long ago, and has not ended."""
        # One that is not forked yet is the launcher's to wait for.
        is_late = now - self._killed_at >= KILL_SECONDS
        return is_late and self.pid is not None and self.exit is None

    def close(self) -> None:
        """Closes this side of the socket."""
        if not self.is_at_end:
            self._unregister()
        self._socket.close()

    def _unregister(self) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):  # an interrupt may have come between
                self._selector.unregister(self._socket)

    def __repr__(self) -> str:
        """Returns the process id, and how it ended."""
        state = self.exit or ("at end of file" if self.is_at_end else "running")
        return f"<WorkerHandle pid {self.pid}, {state}>"
