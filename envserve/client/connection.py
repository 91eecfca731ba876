"""The client's DEALER: one per server, used under its lane's lock only."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from envserve.errors import ConnectError
from envserve.session import ClientSession
from envserve.transport import (
    NOBLOCK,
    FrameReceiver,
    Frames,
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

__all__ = ["SLICE_SECONDS", "Connection", "Descriptor", "Exchange", "ask_welcome"]

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

#: Plain numbers: ZeroMQ's own flags are slow to combine.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

#: A result may be large, but not endless.
_MAX_FRAME_BYTES: Final = 1 << 30


class Connection:
    """A connection that reconnects on its own, and never waits by itself.

    Attributes:
      address: The server's.
      receive: Returns the next message, or None.
      receive_soon: Waits for the next message; None after `SLICE_SECONDS`.
    """

    def __init__(self, address: str) -> None:
        """Begins to connect; raises ConnectError for an address of no known form."""
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Without a look for options that are not used here.
        self._send = super(zmq.Socket, self._socket).send
        receiver = FrameReceiver(self._socket, MAX_FRAMES + 1, 1)
        self.receive: Callable[[], Frames | None] = receiver.receive
        self.receive_soon = partial(receiver.receive, waits=True)
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
                self._send(frames[0], NOBLOCK)
            else:
                self._socket.send_multipart(frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def look(self) -> tuple[bool, bool]:
        """Tells whether `receive` has something, and if the server can be reached."""
        events = int(self._socket.getsockopt(zmq.EVENTS))
        return bool(events & _POLLIN), bool(events & _POLLOUT)

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        """Waits until something can be received (or sent, if asked for)."""
        events = zmq.POLLIN | zmq.POLLOUT if for_writing else zmq.POLLIN
        milliseconds = math.ceil(1000 * max(0.0, timeout_seconds))
        zmq.zmq_poll([(self._socket, events)], milliseconds)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes the socket; messages not sent by then are dropped."""
        self._context.destroy(linger=int(1000 * linger_seconds))


class Exchange:
    """Moves messages between a session and its connection.

    Attributes:
      session: The session.
      connection: The connection.
      due_at: When to `run` at the latest: to see breaks, and to do what is due.
    """

    def __init__(self, session: ClientSession, connection: Connection) -> None:
        self.session = session
        self.connection = connection
        self.due_at = -math.inf
        self._is_connected = False

    def run(self, now: float) -> None:
        """Receives and sends until neither goes on, and looks at the connection.

        Ends with a look that finds nothing: only then is the next message, or break,
        sure to show at the descriptor, which shows nothing twice.
        """
        session, receive = self.session, self.connection.receive
        while True:
            while (frames := receive()) is not None:
                session.receive(frames, now)
            is_readable = self._look(now)
            session.advance(now)
            if not self.flush() and not is_readable:
                return

    def flush(self) -> bool:
        """Sends what can be sent; tells whether there was anything."""
        outbox = self.session.outbox
        has_sent = False
        while outbox and self.connection.send(outbox[key := next(iter(outbox))]):
            del outbox[key]
            has_sent = True
        return has_sent

    def _look(self, now: float) -> bool:
        """Tells the session of the connection, and the caller whether there is more."""
        is_readable, is_connected = self.connection.look()
        if is_connected and not self._is_connected:
            self.session.connected(now)
        elif self._is_connected and not is_connected:
            self.session.disconnected(now)
        self._is_connected = is_connected
        # While there is none, a message that waits can be sent at any moment.
        self.due_at = now + SLICE_SECONDS if is_connected else now
        return is_readable

    def wait(self, deadline: float) -> None:
        """Waits for the server, the session's next deadline, or a little while."""
        now = time.monotonic()
        until = min(deadline, self.session.next_deadline(), now + SLICE_SECONDS)
        wants_to_send = bool(self.session.outbox) or not self._is_connected
        self.connection.wait(until - now, for_writing=wants_to_send)


class Descriptor:
    """One descriptor for what comes, and for what somebody else has received.

    ZeroMQ's own shows an edge, which whoever receives consumes.
    """

    def __init__(self, connection: Connection) -> None:
        """Joins the connection's with a wake-up of our own."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._is_awake = False  # whether a byte is in that pair
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._reader, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._selector.fileno()

    def wake(self) -> None:
        """Makes it readable, until `sleep`."""
        if not self._is_awake:
            self._is_awake = True
            self._writer.send(b"!")

    def sleep(self) -> None:
        """Lets it show again only what comes."""
        if self._is_awake:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(64)
            self._is_awake = False

    def close(self) -> None:
        """Closes all of it."""
        self._selector.close()
        self._reader.close()
        self._writer.close()


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
