"""The client's DEALER: one per server, used under its lane's lock only."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from envserve.client.link.zmq_guards.resolver import Lookup, is_number
from envserve.client.link.zmq_guards.wakeup import ByteCounter, Waker
from envserve.errors import ConnectError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import CurveKeys
from envserve.wire.constants import MAX_FRAMES
from envserve.wire.message import Buffer
from envserve.wire.sockets import (
    CURVE_OVERHEAD_BYTES,
    NOBLOCK,
    FrameReceiver,
    Frames,
    event_fd,
    set_common_options,
    use_keys,
)

#: Where a connection is that waits for a server to come.
NOWHERE: Final = "a server to come"
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

#: How long a last message to a server that is left may take.
_FAREWELL_MS: Final = 500

#: Plain numbers: ZeroMQ's own flags are slow to combine.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

#: Longest frame that is received at first: all but long rows fit.
_MIN_FRAME_BYTES: Final = 1 << 20
#: What may be received before anybody reads it.
_MAX_UNREAD_BYTES: Final = 16 << 20


class SharedContext:
    """ZeroMQ's threads, which several connections share; ends with the last of them.

    docs/decisions.md: "The connections of a batch share ZeroMQ's threads".
    """

    def __init__(self, num_connections: int) -> None:
        """Begins with the first socket."""
        self._num_connections = num_connections
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users: set[Connection] = set()
        self._lock = threading.RLock()  # a lane that is dropped leaves in any thread

    def socket(self, user: Connection) -> zmq.Socket[bytes]:
        """Returns a new DEALER of a connection."""
        with self._lock:
            if self._context is None:
                self._context = self._open()
            socket = self._context.socket(zmq.DEALER)
            self._users.add(user)
        return socket

    def _open(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Has a thread for two cores: the other one is for who computes."""
        count, num_threads = self._num_connections, 1
        if count > 1:
            from envserve.host_resources import num_cores  # which a probe does not need

            num_threads = max(1, min(count, num_cores() // 2))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_threads)
        # Each may have a former socket, and one that says farewell.
        context.set(zmq.MAX_SOCKETS, max(1023, 4 * count))
        return context

    def leave(self, user: Connection) -> None:
        """Notes that a connection has closed all it had; may be called twice."""
        with self._lock:
            self._users.discard(user)
            if self._context is not None and not self._users:
                self._context.term()  # waits for what lingers


class Connection:
    """A connection that reconnects on its own, and never waits by itself.

    Attributes:
      address: The server's.
      keys: The server's public key and an own pair; None if none are used.
      max_frame_bytes: Longest frame that is received.
      max_row_bytes: The same, but for results of calls, of which few come.
      waker: Has a descriptor that is readable when `receive` may have a message.
      receive: Returns the next message, or None.
      receive_soon: Waits for the next message; None after `SLICE_SECONDS`.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None = None,
        *,
        insecure: bool = False,
        context: SharedContext | None = None,
    ) -> None:
        """Begins to connect.

        Args:
          address: The server's.
          keys: The server's public key and an own pair; by default those that this
            user has for the address.
          insecure: Whether none are to be used; see `KeyFolder.keys_for`.
          context: What it shares with others; by default it has threads of its own.

        Raises:
          ConnectError: The address has no known form, or its server's key is not known.
          KeyFileError: A file of keys cannot be read, or others can.
        """
        self.address = address
        self._insecure = insecure
        self.keys = keys or self.keys_for(address)
        self.max_frame_bytes = self.max_row_bytes = _MIN_FRAME_BYTES
        self._former: zmq.Socket[bytes] | None = None
        self._lookup: Lookup | None = None
        self.waker = Waker()
        self._context = context or SharedContext(1)
        self._open()

    def keys_for(self, address: str) -> CurveKeys | None:
        """Returns those to use at an address; raises as the constructor does."""
        if address == NOWHERE:
            return None
        return KeyFolder().keys_for(address, insecure=self._insecure)

    def _open(self) -> None:
        self._socket = socket = self._context.socket(self)
        # Without a look for options that are not used here.
        self._send = super(zmq.Socket, socket).send
        receiver = FrameReceiver(socket, MAX_FRAMES + 1, 1)
        self._byte_counter = ByteCounter(receiver, self.address)
        self.receive: Callable[[], Frames | None] = receiver.receive
        self.receive_soon = partial(receiver.receive, wait=True)
        set_common_options(socket)
        # Else requests are queued for a server that is gone, and reach the next one.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * SLICE_SECONDS))
        # Whoever reads no more is sent no more: the rest waits at the server.
        limit = max(2, _MAX_UNREAD_BYTES // self.max_row_bytes)
        socket.setsockopt(zmq.RCVHWM, limit)
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        if self.keys is not None:
            use_keys(socket, *self.keys)
        self._connected_to = ""
        if is_number(self.address) and self.address != NOWHERE:
            self._connect(self.address)
        elif self._lookup is None or self._lookup.address != self.address:
            self._lookup = Lookup(self.address) if self.address != NOWHERE else None
        self.waker.watch(event_fd(socket))

    def _connect(self, address: str) -> None:
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectError(
                f"expected an address like tcp://host:5555 or ipc:///path; "
                f"got {self.address!r} ({error.strerror})"
            ) from None
        self._connected_to = address

    def _end_lookup(self, timeout_seconds: float = 0.0) -> None:
        """Begins to connect if the server's number is known within so long.

        If nobody knows it, the next `renew` asks again.
        """
        if self._lookup is not None and self._lookup.has_ended.wait(timeout_seconds):
            found, self._lookup = self._lookup.found, None
            if found:
                self._connect(found)

    def renew(self, max_frame_bytes: int = 0) -> None:
        """Begins to connect anew, for frames as long as before or longer ones.

        Without a free descriptor all stays as it is, to be tried again.
        """
        longest = self.max_frame_bytes
        self.max_frame_bytes = max(longest, max_frame_bytes)
        self.forget_former()
        former = self._socket
        try:
            self._open()
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.max_frame_bytes = longest
            return
        self._former = former
        if max_frame_bytes:
            self.forget_former()

    def move(
        self, address: str, keys: CurveKeys | None, farewell: list[Buffer]
    ) -> None:
        """Leaves the server for another: nothing that it sends yet is received."""
        self.keys = keys
        self.send(farewell)
        self.forget_former()
        former, self.address = self._socket, address
        self._open()
        former.close(linger=_FAREWELL_MS)

    def has_former_connected(self) -> bool:
        """Tells whether the socket before the last `renew` has a connection too."""
        former = self._former
        return former is not None and bool(
            int(former.getsockopt(zmq.EVENTS)) & _POLLOUT
        )

    def forget_former(self) -> None:
        """Closes that socket."""
        if self._former is not None:
            self._former.close(linger=0)
            self._former = None

    def is_endless(self, is_connected: bool) -> bool:
        """Tells whether more has come than any message may have."""
        most = (MAX_FRAMES + 1) * (self.max_frame_bytes + CURVE_OVERHEAD_BYTES)
        return self._byte_counter.count(is_connected) > most

    def drop(self) -> None:
        """Ends the connection, with what has come of a message."""
        if self._connected_to:
            self._socket.disconnect(self._connected_to)
            self._connected_to = ""

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

    def flush(self, outbox: dict[int, list[Buffer]]) -> bool:
        """Sends what can be sent, and deletes it; tells whether there was anything."""
        has_sent = False
        while outbox and self.send(outbox[key := next(iter(outbox))]):
            del outbox[key]
            has_sent = True
        return has_sent

    def poll(self) -> tuple[bool, bool]:
        """Tells whether `receive` has something, and if the server can be reached."""
        if self._lookup is not None:
            self._end_lookup()
        events = int(self._socket.getsockopt(zmq.EVENTS))
        return bool(events & _POLLIN), bool(events & _POLLOUT)

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        """Waits until something can be received (or sent, if asked for)."""
        until = time.monotonic() + timeout_seconds
        self._end_lookup(max(0.0, timeout_seconds))
        events = zmq.POLLIN | zmq.POLLOUT if for_writing else zmq.POLLIN
        milliseconds = math.ceil(1000 * max(0.0, until - time.monotonic()))
        zmq.zmq_poll([(self._socket, events)], milliseconds)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes the socket; messages not sent by then are dropped."""
        self.waker.close()
        self.forget_former()
        self._socket.close(linger=int(1000 * linger_seconds))
        self._context.leave(self)
