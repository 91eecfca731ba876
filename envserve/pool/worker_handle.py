"""The pool's side of one worker process: start it, talk to it, learn of its end.

Nothing but `wait` waits. A process has ended when its socket is at end of file; its
exit status follows from the launcher.
"""

from __future__ import annotations

import math
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from envserve import codec
from envserve.channel import Frame, FrameReader, Kind, pack_frame
from envserve.lane import Block, PoolConfig
from envserve.pool.launcher import Exit, Launcher
from envserve.slab import Slab
from envserve.wrappers import plain_wrappers

__all__ = ["WorkerHandle"]


class WorkerHandle:
    """One process of a worker; a restarted worker gets a new handle.

    Attributes:
      pid: Process id, or None until the launcher has reported it.
      exit: How the process ended, or None.
      is_at_end: Whether its socket is at end of file.
    """

    def __init__(self, launcher: Launcher) -> None:
        """Starts the process; raises WorkerError if that is not possible."""
        self.pid: int | None = None
        self.exit: Exit | None = None
        self.is_at_end = False
        self._launcher = launcher
        self._reader = FrameReader()
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._handle, self._socket = launcher.launch(self._on_start, self._on_exit)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _on_start(self, pid: int) -> None:
        self.pid = pid

    def _on_exit(self, exit_: Exit) -> None:
        self.exit = exit_

    def fileno(self) -> int:
        """Descriptor that is readable when `read` has something."""
        return self._socket.fileno()

    def build(
        self,
        config: PoolConfig,
        worker: int,
        num_workers: int,
        blocks: Sequence[Block],
        incarnations: Sequence[int],
    ) -> None:
        """Tells the process which envs to build."""
        message: dict[str, Any] = {
            "env_name": config.env_name,
            "env_kwargs": dict(config.env_kwargs),
            "wrappers": plain_wrappers(config.wrappers),
            "num_envs": config.num_envs,
            "num_workers": num_workers,
            "worker": worker,
            "seed": config.seed,
            "first_env_index": config.first_env_index,
            "autoreset": config.autoreset,
            "infos": config.infos,
            "spare_envs": config.spare_envs,
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

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket can be written to."""
        return bool(self._outbox)

    def send(self, data: bytes, *fds: int) -> None:
        """Sends frames, and descriptors with them, without waiting."""
        if not self._outbox and not fds:
            try:
                sent = self._socket.send(data)
            except OSError:  # full, or at its end: `flush` tells which
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self._outbox.append((data, fds))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                if fds:
                    sent = socket.send_fds(self._socket, [data], fds)
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                # It has ended. What it wrote before can still be read, up to its end.
                self._outbox.clear()
                return
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = (data[sent:], ())

    def read(self) -> list[Frame]:
        """Returns the frames that have come.

        Raises:
          WorkerError: The process sent something that is no frame.
        """
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_at_end = True
            self._launcher.poll()
            return []
        return self._reader.feed(data)

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `read` has something."""
        self._poll.poll(math.ceil(1000 * timeout_seconds))

    def poll_exit(self) -> Exit | None:
        """Returns how the process ended, if that is known by now."""
        if self.exit is None:
            self._launcher.poll()
        return self.exit

    def kill(self, *, has_stack: bool = False) -> None:
        """Has the process and its children killed; its exit status follows.

        Args:
          has_stack: Have it write its Python stack to stderr first.
        """
        self._launcher.kill(self._handle, has_stack=has_stack)

    def close(self) -> None:
        """Closes this side of the socket."""
        self._socket.close()

    def __repr__(self) -> str:
        """Returns the process id, and how it ended."""
        state = self.exit or ("at end of file" if self.is_at_end else "running")
        return f"<WorkerHandle pid {self.pid}, {state}>"
