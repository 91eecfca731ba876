"""The ROUTER sockets of a server; `reopen` closes all connections.

libzmq 4.3.5 can neither limit the memory and descriptors of its connections nor close a
single connection. When connections use too much, `reopen` closes all of them, which
frees their memory and descriptors. No lease ends, because clients reconnect and resend
unanswered requests. Meanwhile, the listening sockets stay open (see `listeners`), so
the kernel queues new connections.

A route is valid for one socket only. Therefore each socket has a number, and messages
for a peer of a closed socket are dropped. All methods run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import socket as socketlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import zmq

from envserve.server.zmq_guards.listeners import close_listener, listen
from envserve.server.zmq_guards.zap import DOMAIN
from envserve.session.server.decisions import Audit
from envserve.wire.constants import MAX_FRAMES
from envserve.wire.sockets import (
    CURVE_OVERHEAD_BYTES,
    FrameReceiver,
    event_fd,
    exclude_other_users,
    set_common_options,
)

_LOGGER: Final = logging.getLogger(__name__)
#: Maximum number of queued replies to one client.
_SEND_LIMIT: Final = 64
#: Maximum number of queued messages from one client.
_RECEIVE_LIMIT: Final = 256
#: Time limit for the handshake of a new connection.
_HANDSHAKE_MS: Final = 2000
#: Time limit for sending the last replies.
_LINGER_MS: Final = 100
#: Seconds between two attempts to reopen the sockets.
_RETRY_SECONDS: Final = 0.001
#: Number of closures within `_BLAMED_SECONDS` for which a user is shut out.
_MAX_BLAMED: Final = 3
_BLAMED_SECONDS: Final = 60.0
#: Maps schemes to the user of all peers, for sockets without keys.
_USERS: Final = {"ipc": "local", "tcp": ""}


class ServerSocket:
    """A ROUTER socket, with methods that are fast because they bypass pyzmq's layers.

    Attributes:
      zmq: The socket.
      number: Sequence number of the socket since the server started.
      user: The user of all peers, if the socket uses no keys.
      has_keys: Whether the socket uses keys, so that each message names its user.
      receiver: Receives the messages.
      receive: Method of `receiver` that returns the frames of the next message.
      send: Method that sends one frame.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], number: int, user: str, has_keys: bool
    ) -> None:
        self.zmq = socket
        self.number = number
        self.user = user
        self.has_keys = has_keys
        self.receiver = FrameReceiver(socket, MAX_FRAMES + 2, 2)
        self.receive = self.receiver.receive
        # Skip the Python layer around pyzmq's Cython method, for speed.
        self.send: Callable[..., object] = super(zmq.Socket, socket).send

    @property
    def sender(self) -> str:
        """The user who sent the latest message; "" on tcp without keys, or if unknown.

        The user is read from each message and not stored by route, because peers choose
        their routes.
        """
        if not self.has_keys:
            return self.user
        try:
            return str(self.receiver.first_frame.get("User-Id"))
        except zmq.ZMQError:
            return ""

    @property
    def sender_address(self) -> str:
        """The IP address that sent the latest message; "" if unknown."""
        try:
            return str(self.receiver.first_frame.get("Peer-Address"))
        except zmq.ZMQError:
            return ""


class ServerSockets:
    """One ROUTER socket for all tcp addresses and one for all ipc addresses.

    Attributes:
      addresses: Addresses to listen on, with real ports after `listen`.
      context: ZeroMQ context of the sockets.
      by_number: The open sockets, by `ServerSocket.number`.
      rotation: The open sockets in the order in which to read them next.
      num_reopened: Number of times that all connections were closed.
    """

    def __init__(
        self,
        binds: Sequence[str],
        max_message_bytes: int,
        loop: asyncio.AbstractEventLoop,
        secret: bytes | None = None,
        audit: Callable[[Audit], None] = lambda event: None,
    ) -> None:
        """Create the sockets; call `listen` and `start_reading` next.

        Without the server's secret key, tcp uses no keys.
        """
        self._secret = secret
        self._audit = audit
        self.addresses = list(binds)
        # libzmq 4.3.5 draws the first peer's route from `rand()`, which libzmq does not
        # seed, and counts up from there. If a peer announces the next route as its
        # routing id, an assertion in libzmq (`routing_socket_base_t::add_out_pipe`)
        # aborts this process.
        ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._loop = loop
        self._on_readable: Callable[[], object] | None = None
        self._reopen_timer: asyncio.TimerHandle | None = None
        self._listeners: list[socketlib.socket] = []
        self._num_created = self.num_reopened = 0
        #: Times of the latest closures, by the user that caused them.
        self._blamed: dict[str, list[float]] = {}
        self._create_sockets()

    def _create_sockets(self) -> None:
        self.by_number: dict[int, ServerSocket] = {}
        for user in {_USERS[address.partition("://")[0]] for address in self.addresses}:
            socket = self.context.socket(zmq.ROUTER)
            number = self._num_created = self._num_created + 1
            has_keys = user != "local" and self._secret is not None
            self.by_number[number] = ServerSocket(socket, number, user, has_keys)
            set_common_options(socket)
            # Without this option, ZeroMQ silently drops replies that cannot be sent.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(
                zmq.MAXMSGSIZE, self._max_message_bytes + CURVE_OVERHEAD_BYTES
            )
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
            socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
            if user == "local":
                exclude_other_users(socket)
            elif self._secret is not None:
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
                # Without ZAP_DOMAIN, libzmq accepts every key. Without
                # ZAP_ENFORCE_DOMAIN, it accepts every key while no handler replies.
                socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.rotation = deque(self.by_number.values())
        self._pollable = [(socket.zmq, int(zmq.POLLIN)) for socket in self.rotation]

    def listen(self) -> None:
        """Listen on every address; raise ServerError if one cannot be used."""
        for index, address in enumerate(self.addresses):
            listener, self.addresses[index] = listen(address)
            self._listeners.append(listener)
        self._accept()

    def _accept(self) -> None:
        """Make libzmq accept connections on the listening sockets."""
        by_user = {socket.user: socket.zmq for socket in self.by_number.values()}
        for address, listener in zip(self.addresses, self._listeners, strict=True):
            socket = by_user[_USERS[address.partition("://")[0]]]
            socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            socket.bind(address)

    @contextlib.contextmanager
    def listening_on_loopback(self) -> Iterator[str]:
        """Also listen on a free loopback port within the context; yield its address."""
        (socket,) = (s.zmq for s in self.by_number.values() if s.user != "local")
        socket.setsockopt(zmq.USE_FD, -1)  # -1: libzmq creates the listening socket
        socket.bind("tcp://127.0.0.1:0")
        address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        try:
            yield address
        finally:
            socket.unbind(address)

    def start_reading(self, callback: Callable[[], object]) -> None:
        """Make the event loop call `callback` when messages may have arrived.

        ZeroMQ's descriptor is edge-triggered: it does not report messages that were
        left unread, or that arrived during a send. Check `has_unread` for these.
        """
        self._on_readable = callback
        for socket in self.by_number.values():
            self._loop.add_reader(event_fd(socket.zmq), callback)

    def stop_reading(self) -> None:
        """Stop calling the callback."""
        self._on_readable = None
        if self._reopen_timer is not None:
            self._reopen_timer.cancel()
        self._remove_readers()

    def _remove_readers(self) -> None:
        for socket in self.by_number.values():
            self._loop.remove_reader(event_fd(socket.zmq))

    def has_unread(self) -> bool:
        """Return whether a message can be received."""
        return bool(zmq.zmq_poll(self._pollable, 0))

    def is_shut_out(self, user: str) -> bool:
        """Return whether the user is rejected for causing `reopen` too often.

        Each call to `reopen` closes the connections of all users; a call that names
        this user as the cause counts for `_BLAMED_SECONDS`.
        """
        since = self._loop.time() - _BLAMED_SECONDS
        return sum(time > since for time in self._blamed.get(user, ())) >= _MAX_BLAMED

    def reopen(self, reason: str, user: str = "", *, shut_out: bool = False) -> None:
        """Close all connections, and accept new ones.

        Args:
          reason: The reason, for the log.
          user: The user who caused the closure, if known. After `_MAX_BLAMED` closures,
            the user is shut out.
          shut_out: Whether to shut out the user immediately.
        """
        if user:
            recent = self._blamed.setdefault(user, [])
            recent += [self._loop.time()] * (_MAX_BLAMED if shut_out else 1)
            del recent[:-_MAX_BLAMED]
            reason += f", by {user}"
            if self.is_shut_out(user):
                reason += f"; {user} is rejected for {_BLAMED_SECONDS:g} s"
                self._audit(Audit("shut out", user, reason=reason))
        _LOGGER.warning("closed all connections (%s); clients can reconnect", reason)
        self.num_reopened += 1
        self._remove_readers()
        self._close_sockets()
        if self._reopen_timer is None:
            self._try_reopen()

    def _try_reopen(self) -> None:
        self._reopen_timer = None
        try:
            self._create_sockets()
            self._accept()
        except (OSError, zmq.ZMQError):  # libzmq has not closed its descriptors yet
            self._close_sockets()
            self._reopen_timer = self._loop.call_later(_RETRY_SECONDS, self._try_reopen)
            return
        if self._on_readable is not None:
            self.start_reading(self._on_readable)
            self._loop.call_soon(self._on_readable)  # messages may have arrived already

    def _close_sockets(self) -> None:
        for socket in self.by_number.values():
            socket.zmq.close(linger=0)
        self.by_number, self._pollable = {}, []
        self.rotation.clear()

    def close(self) -> None:
        """Close all sockets; wait at most `_LINGER_MS` for unsent replies."""
        self.stop_reading()
        self.context.destroy(linger=_LINGER_MS)
        for listener in self._listeners:
            close_listener(listener)
