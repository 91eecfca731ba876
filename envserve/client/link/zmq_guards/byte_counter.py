"""Count the bytes of an unfinished message, so that its size can be limited.

libzmq limits neither the number of frames of a message nor the bytes that it buffers
for an incomplete message, and it reports a message only when it is complete, so a
malicious peer could exhaust the memory. `ByteCounter` therefore reads how many bytes
the kernel has received over the connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import struct
import sys
import time
from typing import Final

import zmq

from envserve.wire.sockets import FrameReceiver

#: The field `tcpi_bytes_received` of Linux's `tcp_info`.
_RECEIVED: Final = struct.Struct("=128xQ")


class ByteCounter:
    """Counts the bytes received since the last message; only for TCP on Linux."""

    def __init__(self, receiver: FrameReceiver, address: str) -> None:
        """Count bytes for the socket of `receiver`, which connects to `address`."""
        self._receiver = receiver
        port = address.rpartition(":")[2]
        is_counted = sys.platform == "linux" and address.startswith("tcp:")
        self._port = int(port) if is_counted and port.isdigit() else 0
        #: Numbers of messages and bytes received when counting began, with which later
        #: numbers are compared.
        self._num_messages = self._num_bytes = 0
        self._is_connected, self._since = False, math.inf
        #: Descriptor of the connection that delivered the last message; None if it has
        #: not been read from the message yet, -1 if there was no message.
        self._fd: int | None = -1

    def count(self, is_connected: bool) -> int:
        """Return an upper bound of the bytes received since the last message.

        Call this after each poll of the socket.
        """
        receiver = self._receiver
        if is_connected != self._is_connected or not self._port:
            self._is_connected, self._fd, self._num_bytes = is_connected, -1, 0
            self._num_messages, self._since = receiver.num_messages, time.monotonic()
            return 0
        if not is_connected:
            return 0
        if receiver.num_messages != self._num_messages:
            self._num_messages, self._fd = receiver.num_messages, None
            return 0
        if self._fd is None:  # first call without a new message: start counting
            self._fd = int(receiver.first_frame.get(zmq.SRCFD))
            self._num_bytes = _bytes_received(self._fd, self._port)
        if self._fd >= 0:
            return _bytes_received(self._fd, self._port) - self._num_bytes
        # libzmq reveals the descriptor only with a message, and this connection has not
        # delivered one yet. Use the smallest count of all connections to this port, so
        # that the bytes of other connections do not count against this one.
        return _FEWEST.to_port(self._port, self._since)


class FewestBytes:
    """The smallest number of bytes received over any connection, for each port.

    One scan of the process's descriptors serves all ports, and scans take at most a
    tenth of the time. Otherwise, the cost of attaching to many servers would grow with
    the square of their number. With few descriptors, the pauses between scans are
    short, because an endless message would fill the memory during a long pause.
    """

    def __init__(self) -> None:
        self._found, self._found_at = dict[int, int](), -math.inf
        self._next_at = -math.inf

    def to_port(self, port: int, since: float) -> int:
        """Return the fewest bytes that a connection to a port has received.

        Return 0 if the latest scan was before `since`, because that scan may have found
        only older connections to the port, which have received more.
        """
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + 0.5  # so that other threads do not scan meanwhile
            found: dict[int, int] = {}
            with contextlib.suppress(OSError):  # no /proc, or no free descriptor
                for fd in map(int, os.listdir("/proc/self/fd")):
                    peer_port, num_bytes = _received(fd)
                    if num_bytes:
                        fewest = found.get(peer_port, num_bytes)
                        found[peer_port] = min(num_bytes, fewest)
            self._found, self._found_at = found, now
            self._next_at = now + 10 * (time.monotonic() - now)
        return self._found.get(port, 0) if self._found_at >= since else 0


_FEWEST: Final = FewestBytes()


def _bytes_received(fd: int, port: int) -> int:
    """Return the bytes received over `fd`; 0 if it is no connection to `port`."""
    peer_port, num_bytes = _received(fd)
    return num_bytes if peer_port == port else 0


def _received(fd: int) -> tuple[int, int]:
    """Return the peer's port of a TCP connection, and the bytes received over it.

    Both are 0 if `fd` is not a TCP connection, and on systems other than Linux.
    """
    if sys.platform != "linux":
        return 0, 0
    # libzmq owns the descriptor and may have closed it. Use a duplicate, which Python
    # may close: if an interrupt made Python close the original, libzmq would abort.
    with contextlib.suppress(OSError, IndexError, struct.error):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return 0, 0
        fd = os.dup(fd)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd) as duplicate:
            port, size = duplicate.getpeername()[1], _RECEIVED.size
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            return int(port), int(_RECEIVED.unpack(info)[0])
    return 0, 0
