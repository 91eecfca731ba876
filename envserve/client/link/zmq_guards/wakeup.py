"""A descriptor that signals messages of a ZeroMQ socket, or a call to `wake`."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Waker:
    """A descriptor that is readable when a message arrives, or after `wake`.

    The descriptor of a ZeroMQ socket is edge-triggered: it signals an event only once,
    to the first thread that uses the socket.
    """

    def __init__(self) -> None:
        """Create the descriptor; until `watch` is called, only `wake` affects it."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._is_awake = False  # whether a byte is in the socket pair
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)

    def watch(self, descriptor: int) -> None:
        """Watch this ZeroMQ descriptor instead of the previous one.

        This also works if the previous call was interrupted.
        """
        for watched in {*self._selector.get_map()} - {self._reader.fileno()}:
            self._selector.unregister(watched)
        self._selector.register(descriptor, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._selector.fileno()

    def wake(self) -> None:
        """Make the descriptor readable until `sleep` is called."""
        if not self._is_awake:
            self._is_awake = True
            self._writer.send(b"!")

    def sleep(self) -> None:
        """Make the descriptor unreadable until `wake` is called."""
        if self._is_awake:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(64)
            self._is_awake = False

    def close(self) -> None:
        """Close all descriptors except the one that belongs to libzmq."""
        self._selector.close()
        self._reader.close()
        self._writer.close()
