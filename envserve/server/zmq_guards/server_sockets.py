"""The ROUTER sockets of a server, which are closed and reopened all at once.

libzmq 4.3.5 can neither bound what its connections hold nor close a single one. When
they take too much, all connections are closed, with everything that they hold. No lease
ends: clients connect again, and repeat the requests that were not answered. Routes are
valid for one socket only. Therefore each socket has a number, and messages for a peer
of a socket that was closed are dropped.
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

from envserve.server.zmq_guards.listeners import listen
from envserve.server.zmq_guards.zap import DOMAIN
from envserve.session.server.decisions import Audit
from envserve.wire.constants import MAX_FRAMES
from envserve.wire.sockets import (
    CURVE_OVERHEAD_BYTES,
    FrameReceiver,
    event_fd,
    set_common_options,
)

_LOGGER: Final = logging.getLogger(__name__)
_SEND_LIMIT: Final = 64  # short replies that wait for one slow reader
_RECEIVE_LIMIT: Final = 256  # messages of one client that wait to be read
_HANDSHAKE_MS: Final = 2000
#: How long the last replies may take to leave.
_LINGER_MS: Final = 100
_RETRY_SECONDS: Final = 0.001
#: A user for whom connections were closed so often is shut out for so many seconds.
_MAX_BLAMED: Final = 3
_BLAMED_SECONDS: Final = 60.0
#: The user of all peers of a socket that uses no keys, by scheme.
_USERS: Final = {"ipc": "local", "tcp": ""}


class ServerSocket:
    """A ROUTER socket, prepared for fast use.

    Attributes:
      zmq: The socket.
      number: Sequence number of the socket since the server started.
      user: The user of all its peers, if they have no keys.
      has_keys: Whether each message names the user of the key that it was sent with.
      receiver: Receives its messages, by `receive`.
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
        #: Bypasses a layer of Python that serves other types of sockets.
        self.send: Callable[..., object] = super(zmq.Socket, socket).send

    @property
    def sender(self) -> str:
        """The user of the latest message; "" without keys, or if libzmq has no name.

        It is read for each message, because peers choose their routes themselves.
        """
        if not self.has_keys:
            return self.user
        try:
            return str(self.receiver.first_frame.get("User-Id"))
        except zmq.ZMQError:
            return ""


class ServerSockets:
    """A ROUTER socket for tcp and one for ipc, as far as there are addresses for them.

    Attributes:
      addresses: Addresses to listen on; with real ports once `listen` was called.
      context: ZeroMQ context of the sockets.
      by_number: The sockets that are open now.
      in_turn: The same; the next one to read from is first.
      pollable: The same, for `zmq_poll`.
      num_reopened: How often all connections were closed.
    """

    def __init__(
        self,
        binds: Sequence[str],
        max_message_bytes: int,
        loop: asyncio.AbstractEventLoop,
        secret: bytes | None = None,
        audit: Callable[[Audit], None] = lambda event: None,
    ) -> None:
        """Create the sockets; `listen` and `read_with` have to follow.

        Args:
          binds: Addresses to listen on.
          max_message_bytes: Size limit of a message.
          loop: Event loop that reads from them.
          secret: The server's secret key; without one, tcp uses no keys.
          audit: Takes events for the audit log.
        """
        self._secret = secret
        self._audit = audit
        self.addresses = list(binds)
        _seed_routes()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._loop = loop
        self._on_readable: Callable[[], object] | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._listeners: list[socketlib.socket] = []
        self._num_made = self.num_reopened = 0
        self._blamed: dict[str, list[float]] = {}  # when connections were closed
        self._make()

    def _make(self) -> None:
        self.by_number: dict[int, ServerSocket] = {}
        for user in {_USERS[address.partition("://")[0]] for address in self.addresses}:
            socket = self.context.socket(zmq.ROUTER)
            number = self._num_made = self._num_made + 1
            has_keys = user != "local" and self._secret is not None
            self.by_number[number] = ServerSocket(socket, number, user, has_keys)
            set_common_options(socket)
            # Without it, replies that cannot be sent vanish unnoticed.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(
                zmq.MAXMSGSIZE, self._max_message_bytes + CURVE_OVERHEAD_BYTES
            )
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
            socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
            if user == "local":
                socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            elif self._secret is not None:
                _use_keys(socket, self._secret)
        self.in_turn = deque(self.by_number.values())
        self.pollable = [(each.zmq, int(zmq.POLLIN)) for each in self.in_turn]

    def listen(self) -> None:
        """Listen on every address; raise ServerError if one cannot be used."""
        for index, address in enumerate(self.addresses):
            listener, self.addresses[index] = listen(address)
            self._listeners.append(listener)
        self._accept()

    def _accept(self) -> None:
        """Let the sockets accept connections from the listening sockets."""
        by_user = {each.user: each.zmq for each in self.by_number.values()}
        for address, listener in zip(self.addresses, self._listeners, strict=True):
            socket = by_user[_USERS[address.partition("://")[0]]]
            socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            socket.bind(address)

    @contextlib.contextmanager
    def listening_on_loopback(self) -> Iterator[str]:
        """Let the tcp socket listen on loopback as well; yield the address."""
        (socket,) = (s.zmq for s in self.by_number.values() if s.user != "local")
        socket.setsockopt(zmq.USE_FD, -1)  # libzmq binds it, without a listener of ours
        socket.bind("tcp://127.0.0.1:0")
        address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        try:
            yield address
        finally:
            socket.unbind(address)

    def read_with(self, callback: Callable[[], object]) -> None:
        """Let the event loop call back when a message may have arrived.

        ZeroMQ's descriptor is edge-triggered: it does not report messages that were
        left unread, or that arrived during a send; see `has_unread`.
        """
        self._on_readable = callback
        for each in self.by_number.values():
            self._loop.add_reader(event_fd(each.zmq), callback)

    def stop_reading(self) -> None:
        """Stop calling back."""
        self._on_readable = None
        if self._reopening is not None:
            self._reopening.cancel()
        self._remove_readers()

    def _remove_readers(self) -> None:
        for each in self.by_number.values():
            self._loop.remove_reader(event_fd(each.zmq))

    def has_unread(self) -> bool:
        """Return whether a message can be received."""
        return bool(zmq.zmq_poll(self.pollable, 0))

    @property
    def discarding(self) -> str | None:
        """The user whose message of too many frames is being discarded, if any."""
        sockets = (s for s in self.in_turn if s.receiver.is_discarding)
        return next((socket.sender for socket in sockets), None)

    def is_shut_out(self, user: str) -> bool:
        """Return whether connections were closed repeatedly because of this user."""
        since = self._loop.time() - _BLAMED_SECONDS
        return sum(at > since for at in self._blamed.get(user, ())) >= _MAX_BLAMED

    def recycle(self, why: str, user: str = "", *, is_sure: bool = False) -> None:
        """Close all connections, and listen again.

        Args:
          why: The reason, for the log.
          user: The user who caused it, if known, who is shut out after a few times.
          is_sure: Whether the user is shut out at once.
        """
        if user:
            recent = self._blamed.setdefault(user, [])
            recent += [self._loop.time()] * (_MAX_BLAMED if is_sure else 1)
            del recent[:-_MAX_BLAMED]
            why += f", by {user}"
            if self.is_shut_out(user):
                why += f"; {user} is not let in for {_BLAMED_SECONDS:g} s"
                self._audit(Audit("shut out", user, reason=why))
        _LOGGER.warning("all connections are closed and can be made anew: %s", why)
        self.num_reopened += 1
        self._remove_readers()
        self._close_sockets()
        if self._reopening is None:
            self._reopen()

    def _reopen(self) -> None:
        self._reopening = None
        try:
            self._make()
            self._accept()
        except (OSError, zmq.ZMQError):  # descriptors are not closed yet
            self._close_sockets()
            self._reopening = self._loop.call_later(_RETRY_SECONDS, self._reopen)
            return
        if self._on_readable is not None:
            self.read_with(self._on_readable)
            self._loop.call_soon(self._on_readable)  # an edge may have been missed

    def _close_sockets(self) -> None:
        for each in self.by_number.values():
            each.zmq.close(linger=0)
        self.by_number, self.pollable = {}, []
        self.in_turn.clear()

    def close(self) -> None:
        """Close everything; the last replies have a moment to leave."""
        self.stop_reading()
        self.context.destroy(linger=_LINGER_MS)
        for listener in self._listeners:
            listener.close()


def _seed_routes() -> None:
    """Make the first number that ZeroMQ gives to a peer unpredictable.

    libzmq 4.3.5 draws it from the C library's generator, which it does not seed. If a
    peer announces the number that is next, an assertion in libzmq
    (`routing_socket_base_t::add_out_pipe`) ends this process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _use_keys(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Accept only keys that the context's `Zap` knows."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    # Unless both are set, libzmq accepts unknown keys while no handler answers, or
    # always.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
