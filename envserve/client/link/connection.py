"""The client's ZeroMQ connection to one server.

Each lane has one DEALER socket, which threads use only while they hold the lane's lock.
libzmq reconnects automatically after an outage of the server or the network, but not
after a protocol error (a rejected key or a frame that is too long). Because the cause
of a disconnection is not known, `renew` opens a new socket. The previous socket stays
open for a while: if it also reconnects, there was no protocol error.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from envserve.client.link.attacher import Attacher
from envserve.client.link.zmq_guards.byte_counter import ByteCounter
from envserve.client.link.zmq_guards.diagnosis import unknown_key_error
from envserve.client.link.zmq_guards.resolver import Lookup, needs_no_lookup
from envserve.client.link.zmq_guards.wakeup import Waker
from envserve.errors import ConnectError
from envserve.keys.key_folder import KeyFolder, UnknownServerKey
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

#: Address of a connection while its lane waits for a server.
NO_ADDRESS: Final = "(no server yet)"
#: Maximum time that `receive_soon` waits. Every reconnection takes longer, so a caller
#: that polls the connection after each slice detects every disconnection.
SLICE_SECONDS: Final = 0.025
#: Delay before the first reconnection attempt, and maximum delay before later ones.
#: libzmq adds a random time of up to `_RECONNECT_MS`.
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 100
#: Timeout of a connection attempt. It is shorter than the kernel's first retransmission
#: of SYN (1 s), so that the client reconnects soon after a cable is plugged in again.
#: Networks with a longer round trip are not supported.
_CONNECT_TIMEOUT_MS: Final = 350
#: Time without a connection after which the next address of the host is tried. It grows
#: with each round of addresses, because a server may be too busy to reply in time.
_NEXT_ADDRESS_SECONDS: Final = 1.0
#: Maximum time to send the DETACH to the previous server.
_DETACH_LINGER_MS: Final = 500

#: Flags as plain ints, because pyzmq's flags are slow to combine.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

#: Initial limit of the frame size; only large rows need more.
_MIN_FRAME_BYTES: Final = 1 << 20
#: Maximum size of the receive queue. Further messages wait on the server.
_MAX_UNREAD_BYTES: Final = 16 << 20


class SharedContext:
    """A ZeroMQ context, with its I/O threads, for the connections of a batch.

    The context is terminated after its last connection has been closed. See the
    decision "The connections of a batch share ZeroMQ's threads".

    Attributes:
      attacher: The thread that attaches the lanes of the batch.
    """

    def __init__(self, num_connections: int) -> None:
        """Prepare for `num_connections`; the first socket creates the context."""
        self.attacher = Attacher()
        self._num_connections = num_connections
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connections: set[Connection] = set()
        #: Whether a socket is being opened. A signal handler that then closes all
        #: connections must not terminate the context, which would wait for the socket.
        self._is_opening = False
        # The lock is reentrant, because a thread that holds it may run the garbage
        # collector, which calls `release` for an unused lane.
        self._lock = threading.RLock()

    def socket(self, connection: Connection) -> zmq.Socket[bytes]:
        """Return a new DEALER socket for a connection."""
        with self._lock:
            if self._context is None:
                self._context = self._open()
            self._is_opening = True
            try:
                socket = self._context.socket(zmq.DEALER)
            finally:
                self._is_opening = False
            self._connections.add(connection)
        return socket

    def _open(self) -> zmq.Context[zmq.Socket[bytes]]:
        count, num_threads = self._num_connections, 1
        if count > 1:
            from envserve.host_resources import num_cores  # not needed by probes

            # Leave half of the cores to the learner.
            num_threads = max(1, min(count, num_cores() // 2))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_threads)
        # A connection has up to three sockets: the current one, the previous one, and a
        # closed one that still sends its last message.
        context.set(zmq.MAX_SOCKETS, max(1023, 4 * count))
        return context

    def release(self, connection: Connection) -> None:
        """Release the context after a connection has closed its sockets; idempotent."""
        with self._lock:
            self._connections.discard(connection)
            if self._connections or self._is_opening:
                return
            if self._context is not None:
                # Close sockets that interrupted calls have opened but not stored; then
                # block until lingering messages are sent.
                self._context.destroy()
                self._context = None


class Connection:
    """A non-blocking connection to a server, which reconnects by itself.

    Attributes:
      address: Address of the server.
      keys: The server's public key and the client's key pair; None without keys.
      max_frame_bytes: Size limit of a received frame.
      max_row_bytes: Size of the largest expected frame, excluding results of attribute
        calls; it determines the length of the receive queue.
      waker: A `Waker` whose descriptor is readable when `receive` may return a message.
      receive: Method that returns the next message, or None.
      receive_soon: Method that waits for the next message, and returns None after
        `SLICE_SECONDS`.
      resolved: The addresses that the host name in `address` resolves to; empty if the
        host is unknown or `address` contains no name.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None = None,
        *,
        insecure: bool = False,
        context: SharedContext | None = None,
    ) -> None:
        """Start to connect, unless the address is `NO_ADDRESS`.

        By default, the keys are those in this user's key directory, and the context is
        a new one.

        Raises:
          ConnectError: The address is malformed, the server's key is unknown, or there
            is no free file descriptor.
          KeyFileError: A key file cannot be read, or other users can read it.
        """
        self.address = address
        self._insecure = insecure
        try:
            self.keys = keys or self.keys_for(address)
        except UnknownServerKey as error:
            raise unknown_key_error(address, error) from None
        self.max_frame_bytes = self.max_row_bytes = _MIN_FRAME_BYTES
        self._previous: zmq.Socket[bytes] | None = None
        # None unless a host name is being resolved, or its addresses are being tried.
        self._lookup: Lookup | None = None
        self._try_next_at = 0.0
        self.resolved: list[str] = []
        self._context = context or SharedContext(1)
        try:
            self.waker = Waker()
            self._open()
        except (OSError, zmq.ZMQError) as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise ConnectError(
                f"{address}: cannot open a socket: {error.strerror}; raise the limit "
                f"on open files (ulimit -n)"
            ) from None

    @property
    def tried_text(self) -> str:
        """The part of an error that names the addresses in `resolved`, or ""."""
        return f" at {', '.join(self.resolved)}" if self.resolved else ""

    def keys_for(self, address: str) -> CurveKeys | None:
        """Return the keys for an address.

        Raises:
          ConnectError: The server's key is unknown.
          KeyFileError: A key file cannot be read, or other users can read it.
        """
        if address == NO_ADDRESS:
            return None
        return KeyFolder().keys_for(address, insecure=self._insecure)

    def _open(self) -> None:
        self._socket = socket = self._context.socket(self)
        # Use the base class's `send`, because zmq.Socket.send checks options each time.
        self._send = super(zmq.Socket, socket).send
        receiver = FrameReceiver(socket, MAX_FRAMES + 1, 1)
        self._byte_counter = ByteCounter(receiver, self.address)
        self.receive: Callable[[], Frames | None] = receiver.receive
        self.receive_soon = partial(receiver.receive, int(1000 * SLICE_SECONDS))
        set_common_options(socket)
        # Without this option, libzmq queues requests while there is no connection, and
        # they may reach the next server at this address.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        # When the receive queue is full, further messages wait on the server.
        limit = max(2, _MAX_UNREAD_BYTES // self.max_row_bytes)
        socket.setsockopt(zmq.RCVHWM, limit)
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        if self.keys is not None:
            use_keys(socket, *self.keys)
        self._connected_to, self._try_next_at = "", 0.0
        if needs_no_lookup(self.address):
            self._lookup, self.resolved = None, []
            if self.address != NO_ADDRESS:
                self._connect(self.address)
        elif (lookup := self._lookup) is None or (
            lookup.address != self.address
            or (lookup.has_ended.is_set() and lookup.num_tried >= len(lookup.found))
        ):
            self._lookup, self.resolved = Lookup(self.address), []
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

    def _try_addresses(self, timeout_seconds: float = 0.0) -> None:
        """Connect to an address of the host, or to its next address if that is due.

        If the host is unknown, the next `renew` looks it up again.

        Args:
          timeout_seconds: Maximum time to wait for the host lookup.
        """
        lookup = self._lookup
        if lookup is None or not lookup.has_ended.wait(timeout_seconds):
            return
        self.resolved = lookup.found
        if int(self._socket.getsockopt(zmq.EVENTS)) & _POLLOUT:
            self._lookup = None  # connected
        elif lookup.found and time.monotonic() >= self._try_next_at:
            num_rounds, index = divmod(lookup.num_tried, len(lookup.found))
            wait = _NEXT_ADDRESS_SECONDS * (num_rounds + 1)
            self._try_next_at = time.monotonic() + wait
            lookup.num_tried += 1
            # With a single address, libzmq retries by itself.
            if lookup.found[index] != self._connected_to:
                self.disconnect()
                self._connect(lookup.found[index])

    def renew(self, max_frame_bytes: int = 0) -> None:
        """Open a new socket, and keep the previous one; see the module docstring.

        If there is no free file descriptor, nothing changes, and the caller can retry.

        Args:
          max_frame_bytes: Frame size that the new socket must accept. If it is given,
            the previous socket is closed immediately.
        """
        previous_limit = self.max_frame_bytes
        self.max_frame_bytes = max(previous_limit, max_frame_bytes)
        self.close_previous()
        previous = self._socket
        try:
            self._open()
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.max_frame_bytes = previous_limit
            return
        self._previous = previous
        if max_frame_bytes:
            self.close_previous()

    def move(
        self, address: str, keys: CurveKeys | None, detach_frames: list[Buffer]
    ) -> None:
        """Connect to another server, after sending `detach_frames` to the previous one.

        Later messages from the previous server are ignored.
        """
        self.keys = keys
        if not self._socket.closed:  # an interrupted move may have closed it
            self.send(detach_frames)
        self.close_previous()
        # Close the socket before `_open` replaces it, because the context cannot be
        # closed while a socket is open.
        self._socket.close(linger=_DETACH_LINGER_MS)
        self.address = address
        self._open()

    def is_previous_connected(self) -> bool:
        """Return whether the socket from before the last `renew` is connected."""
        if self._previous is None:
            return False
        return bool(int(self._previous.getsockopt(zmq.EVENTS)) & _POLLOUT)

    def close_previous(self) -> None:
        """Close the socket from before the last `renew`."""
        if self._previous is not None:
            self._previous.close(linger=0)
            self._previous = None

    def exceeds_limit(self, is_connected: bool) -> bool:
        """Return whether an unfinished message is larger than the protocol allows.

        `is_connected` is part of the result of the last `poll`.
        """
        limit = (MAX_FRAMES + 1) * (self.max_frame_bytes + CURVE_OVERHEAD_BYTES)
        return self._byte_counter.count(is_connected) > limit

    def disconnect(self) -> None:
        """Disconnect, and discard an unfinished message."""
        if self._connected_to:
            self._socket.disconnect(self._connected_to)
            self._connected_to = ""

    def send(self, frames: list[Buffer]) -> bool:
        """Queue a message for sending; return False if there is no connection."""
        try:
            if len(frames) == 1:
                self._send(frames[0], NOBLOCK)
            else:
                self._socket.send_multipart(frames, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def flush(self, outbox: dict[int, list[Buffer]]) -> bool:
        """Send messages from `outbox`, in order; remove those that were sent.

        Return whether any message was sent.
        """
        has_sent = False
        while outbox and self.send(outbox[key := next(iter(outbox))]):
            outbox.pop(key, None)  # a signal handler may have closed the lane
            has_sent = True
        return has_sent

    def poll(self) -> tuple[bool, bool]:
        """Return whether a message can be received, and whether a peer is connected."""
        if self._lookup is not None:
            self._try_addresses()
        events = int(self._socket.getsockopt(zmq.EVENTS))
        return bool(events & _POLLIN), bool(events & _POLLOUT)

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        """Wait until a message can be received or, with `for_writing`, sent."""
        until = time.monotonic() + timeout_seconds
        events = zmq.POLLIN | zmq.POLLOUT if for_writing else zmq.POLLIN
        while True:
            if self._lookup is not None:
                self._try_addresses(max(0.0, until - time.monotonic()))
            is_trying = self._lookup is not None and self.resolved
            slice_end = min(until, self._try_next_at) if is_trying else until
            milliseconds = math.ceil(1000 * max(0.0, slice_end - time.monotonic()))
            ready = zmq.zmq_poll([(self._socket, events)], milliseconds)
            if ready or time.monotonic() >= until:
                return

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close the socket; unsent messages are dropped after `linger_seconds`."""
        self.waker.close()
        self.close_previous()
        self._socket.close(linger=int(1000 * linger_seconds))
        self._context.release(self)
