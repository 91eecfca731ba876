"""The client's DEALER: one per server, used under its lane's lock only."""

from __future__ import annotations

import math
import time
from typing import Final

import zmq

from envserve.errors import ConnectError
from envserve.transport import (
    NOBLOCK,
    FrameReceiver,
    Frames,
    can_receive,
    can_send,
    descriptor_of,
    set_common_options,
)
from envserve.wire import (
    Buffer,
    Hello,
    Message,
    MessageType,
    Welcome,
    decode,
    encode,
)
from envserve.wire.constants import MAX_FRAMES

__all__ = ["SLICE_SECONDS", "Connection", "ask_welcome"]

#: Longest that `receive_soon` waits: shorter than a connection is away if it breaks, so
#: that who looks after each slice sees every break.
SLICE_SECONDS: Final = 0.025
#: How soon after a break, and then how often, a connection is tried; ZeroMQ adds up to
#: the first of them at random.
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 100
#: Shorter than the kernel's first retry, so that a cable that is plugged in again is
#: noticed soon: at most this and the longest interval later. No longer round trip can
#: be used.
_CONNECT_TIMEOUT_MS: Final = 350

#: A result may be large, but not endless.
_MAX_FRAME_BYTES: Final = 1 << 30


class Connection:
    """A connection that reconnects on its own, and never waits by itself.

    Attributes:
      address: The server's.
    """

    def __init__(self, address: str) -> None:
        """Begins to connect; raises ConnectError for an address of no known form."""
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._receiver = FrameReceiver(self._socket, MAX_FRAMES + 1, 1)
        set_common_options(self._socket)
        # Else requests are queued for a server that is gone, and reach the next one.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * SLICE_SECONDS))
        self._socket.setsockopt(zmq.RCVHWM, 0)  # in-flight operations are the bound
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectError(
                f"expected an address like tcp://host:5555 or ipc:///path; "
                f"got {address!r} ({error.strerror})"
            ) from None

    def fileno(self) -> int:
        """ZeroMQ's descriptor: an edge says that `receive` may have something."""
        return descriptor_of(self._socket)

    def send(self, frames: list[Buffer]) -> bool:
        """Hands a message over; False if the server cannot be reached now."""
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], NOBLOCK)
            else:
                self._socket.send_multipart(frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Frames | None:
        """Returns the next message, or None."""
        return self._receiver.receive()

    def receive_soon(self) -> Frames | None:
        """Waits for the next message; returns None after `SLICE_SECONDS`."""
        return self._receiver.wait()

    def is_readable(self) -> bool:
        """Tells whether `receive` has something."""
        return can_receive(self._socket)

    def is_writable(self) -> bool:
        """Tells whether the server can be reached now."""
        return can_send(self._socket)

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        """Waits until something can be received (or sent, if asked for)."""
        events = zmq.POLLIN | zmq.POLLOUT if for_writing else zmq.POLLIN
        milliseconds = math.ceil(1000 * max(0.0, timeout_seconds))
        zmq.zmq_poll([(self._socket, events)], milliseconds)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes the socket; messages not sent by then are dropped."""
        self._context.destroy(linger=int(1000 * linger_seconds))


def ask_welcome(address: str, timeout_seconds: float) -> Welcome:
    """Asks a server what it is and has, without attaching.

    Raises:
      ConnectError: No server answered in time.
      RemoteProtocolError: What answers is no server of ours.
    """
    connection = Connection(address)
    deadline = time.monotonic() + timeout_seconds
    hello = Message(type=MessageType.HELLO, body=Hello(client="health").encode())
    is_sent = False
    try:
        while (now := time.monotonic()) < deadline:
            is_sent = is_sent or connection.send(encode(hello))
            while (frames := connection.receive()) is not None:
                message = decode(frames)
                if message.type is MessageType.WELCOME:
                    return Welcome.decode(message.body)
            connection.wait(deadline - now, for_writing=not is_sent)
    finally:
        connection.close()
    raise ConnectError(f"{address}: no server answered within {timeout_seconds:g} s")
