"""The server's sockets: a ROUTER for tcp, one for ipc; made, listening, read, closed.

A peer is (socket, route, user). On tcp the user is whom the message's key belongs to,
which ZeroMQ says with each message; on ipc it is this user, "local". Routes are the
peers' to choose, and mean something to one socket only. So each socket has a number of
its own, and what is for a peer of one that was closed goes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import socket as socketlib
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import zmq

from envserve.errors import ServerError
from envserve.server.zmq_guards.send_budget import LONG_BYTES, Unread
from envserve.server.zmq_guards.zap import DOMAIN
from envserve.session.server.quotas import tell
from envserve.wire.constants import MAX_FRAMES
from envserve.wire.message import Buffer, Peer
from envserve.wire.sockets import (
    CURVE_OVERHEAD_BYTES,
    NOBLOCK,
    FrameReceiver,
    Frames,
    event_fd,
    set_common_options,
)

__all__ = ["Router"]

_LOGGER: Final = logging.getLogger(__name__)
_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
_SEND_LIMIT: Final = 64  # short replies that wait for one slow reader
_RECEIVE_LIMIT: Final = 256  # messages of one client that wait to be read
_BACKLOG: Final = 128
_HANDSHAKE_MS: Final = 2000
#: How long the last replies may take to leave.
_LINGER_MS: Final = 100
#: Frames of one message that are thrown away, before its sender is: with all others,
#: who could not be heard for longer.
_MAX_DISCARDED: Final = 50_000
_RETRY_SECONDS: Final = 0.001
#: Who has all connections closed so often within a time is not let in for as long.
_MAX_BLAMED: Final = 3
_BLAMED_SECONDS: Final = 60.0
#: Who whoever connects to a socket is, if it uses no keys.
_USERS: Final = {"ipc": "local", "tcp": ""}


class _Socket:
    """A ROUTER, and what makes it quick to use.

    Attributes:
      zmq: The socket.
      number: Of all sockets of this process.
      user: Who its peers are, without keys.
      has_keys: Whether each message says whose key it came under.
      receiver: Reads from it; `receive` is its method.
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
        #: Past a layer of Python that serves other types of sockets.
        self.send: Callable[..., object] = super(zmq.Socket, socket).send

    @property
    def sender(self) -> str:
        """Whose the latest message is; never kept, since routes are the peers'.

        "" without keys, or if ZeroMQ does not say.
        """
        if not self.has_keys:
            return self.user
        try:
            return str(self.receiver.first_frame.get("User-Id"))
        except zmq.ZMQError:
            return ""


class Router:
    """All of a server's sockets, as if they were one.

    Attributes:
      addresses: Where it listens, or will; with real ports once it does.
      context: Of the sockets.
      num_reopened: How often all connections were closed, to be made anew.
    """

    def __init__(
        self,
        binds: Sequence[str],
        max_message_bytes: int,
        loop: asyncio.AbstractEventLoop,
        unread: Unread,
        secret: bytes | None = None,
    ) -> None:
        """Makes the sockets; `listen` and `read_with` are to follow.

        Without the server's raw secret key, tcp uses no keys.
        """
        self._secret = secret
        self.addresses = list(binds)
        _seed_routes()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._max_message_bytes = max_message_bytes
        self._loop = loop
        self._unread = unread
        self._on_readable: Callable[[], object] | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._listeners: list[socketlib.socket] = []
        self._num_made = self.num_reopened = 0
        self._blamed: dict[str, list[float]] = {}  # whose fault a recycle was, and when
        self._make()

    def _make(self) -> None:
        self._sockets: dict[int, _Socket] = {}
        for user in {_USERS[address.partition("://")[0]] for address in self.addresses}:
            socket = self.context.socket(zmq.ROUTER)
            number = self._num_made = self._num_made + 1
            has_keys = user != "local" and self._secret is not None
            self._sockets[number] = _Socket(socket, number, user, has_keys)
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
        self._by_turns = deque(self._sockets.values())
        self._readable = [(each.zmq, _POLLIN) for each in self._by_turns]

    def listen(self) -> None:
        """Listens on every address; raises ServerError if that cannot be."""
        for index, address in enumerate(self.addresses):
            listener, self.addresses[index] = _listener(address)
            self._listeners.append(listener)
        self._accept()

    def _accept(self) -> None:
        """Has the sockets accept who connects."""
        by_user = {each.user: each.zmq for each in self._sockets.values()}
        for address, listener in zip(self.addresses, self._listeners, strict=True):
            socket = by_user[_USERS[address.partition("://")[0]]]
            socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            socket.bind(address)

    @contextlib.contextmanager
    def listening_on_loopback(self) -> Iterator[str]:
        """Has the tcp socket listen on loopback too; gives the address."""
        (socket,) = (s.zmq for s in self._sockets.values() if s.user != "local")
        socket.setsockopt(zmq.USE_FD, -1)  # by itself: there is no listener of ours
        socket.bind("tcp://127.0.0.1:0")
        address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        try:
            yield address
        finally:
            socket.unbind(address)

    def read_with(self, callback: Callable[[], object]) -> None:
        """Has the event loop call back when something may have come.

        ZeroMQ's descriptor shows an edge only: it stays silent about what is left
        unread, and about what came in during a send; see `has_unread`.
        """
        self._on_readable = callback
        for each in self._sockets.values():
            self._loop.add_reader(event_fd(each.zmq), callback)

    def stop_reading(self) -> None:
        """Has the event loop call back no more."""
        self._on_readable = None
        if self._reopening is not None:
            self._reopening.cancel()
        self._remove_readers()

    def _remove_readers(self) -> None:
        for each in self._sockets.values():
            self._loop.remove_reader(event_fd(each.zmq))

    def is_shut_out(self, user: str) -> bool:
        """Whether all connections were closed for a user again and again, of late."""
        since = self._loop.time() - _BLAMED_SECONDS
        return sum(at > since for at in self._blamed.get(user, ())) >= _MAX_BLAMED

    def recycle(self, why: str, user: str = "", *, is_sure: bool = False) -> None:
        """Closes all connections, with all that they hold, and listens anew.

        libzmq 4.3.5 can close no single one. No lease ends: clients connect again, and
        repeat what was not answered. The user is whose fault it is, if that is known;
        once is enough to shut it out where that is sure.
        """
        if user:
            recent = self._blamed.setdefault(user, [])
            recent += [self._loop.time()] * (_MAX_BLAMED if is_sure else 1)
            del recent[:-_MAX_BLAMED]
            why += f", by {user}"
            if self.is_shut_out(user):
                why += f"; {user} is not let in for {_BLAMED_SECONDS:g} s"
                tell("shut out", user, reason=why)
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
        for each in self._sockets.values():
            each.zmq.close(linger=0)
        self._sockets, self._readable = {}, []
        self._by_turns.clear()

    def has_unread(self) -> bool:
        """Tells whether something can be received."""
        return bool(zmq.zmq_poll(self._readable, 0))

    @property
    def discarding(self) -> str | None:
        """Whose message of too many frames is being thrown away, if one is."""
        sockets = (s for s in self._by_turns if s.receiver.is_discarding)
        return next((socket.sender for socket in sockets), None)

    def receive(self) -> tuple[Peer, Frames] | None:
        """Returns who sent the next message, and its frames; None if there is none."""
        by_turns = self._by_turns
        for _ in range(len(by_turns)):
            socket = by_turns[0]
            by_turns.rotate()
            while (frames := socket.receive()) is not None:
                user = socket.sender
                if socket.has_keys and not user:
                    continue
                return (socket.number, bytes(frames[0]), user), frames[1:]
            if socket.receiver.num_discarded > _MAX_DISCARDED:
                self.recycle("a message had too many frames", socket.sender)
                break
        return None

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> bool:
        """Hands a message over; False if the peer is gone, or reads too slowly."""
        number, route, _ = peer
        socket = self._sockets.get(number)
        if socket is None:
            return False
        if max(map(len, frames)) >= LONG_BYTES:
            admitted = self._unread.admit(peer, frames)
            if admitted is None:
                return False
            frames = admitted
        send = socket.send
        try:
            send(route, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE, len(frame) < LONG_BYTES)
            send(frames[-1], NOBLOCK, len(frames[-1]) < LONG_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def close(self) -> None:
        """Closes all; what was sent last has a moment to leave."""
        self.stop_reading()
        self.context.destroy(linger=_LINGER_MS)
        for listener in self._listeners:
            listener.close()


def _seed_routes() -> None:
    """Has ZeroMQ number its peers from where nobody can guess.

    libzmq 4.3.5 draws the first number from the C library's generator, and seeds that
    with nothing. If a peer announces the very number that is next, an assertion in it
    (`routing_socket_base_t::add_out_pipe`) ends this process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _use_keys(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Lets nobody in but those whom the context's `Zap` knows."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    # Unless both are set, ZeroMQ lets unknown keys in while nobody answers, or always.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _listener(address: str) -> tuple[socketlib.socket, str]:
    """Returns a socket that listens on an address, and the address with its real port.

    ZeroMQ accepts from a copy. What it has bound itself is not free again at once when
    closed; and without a free descriptor its bind ends this process.

    Raises:
      ServerError: That cannot be.
    """
    scheme, _, rest = address.partition("://")
    family, remedy = socketlib.AF_INET, "is another server running there?"
    if scheme == "ipc":
        family, remedy = socketlib.AF_UNIX, "name a path in a folder of yours"
    elif "[" in rest:
        family = socketlib.AF_INET6
    listener = socketlib.socket(family)
    listener.setblocking(False)
    try:
        if scheme == "ipc":
            _bind_file(listener, rest)
        else:
            host, _, port = rest.rpartition(":")
            listener.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_REUSEADDR, 1)
            listener.bind(("" if host == "*" else host.strip("[]"), int(port)))
            number, port = listener.getsockname()[:2]
            address = (
                f"tcp://[{number}]:{port}" if "[" in rest else f"tcp://{number}:{port}"
            )
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise ServerError(f"cannot listen on {address}: {why}; {remedy}") from None
    return listener, address


def _bind_file(listener: socketlib.socket, path: str) -> None:
    """Binds to a path, whose file only this user can use whatever the umask."""
    if path[0] == "@":  # no file at all
        listener.bind(f"\0{path[1:]}")
        return
    _make_way(Path(path))
    umask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(umask)


def _make_way(path: Path) -> None:
    """Removes the socket of a server that is gone; makes the folder if need be.

    Raises:
      OSError: There is something else.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("expected no file there, or the socket of a server that is gone")
    if found.st_uid != os.geteuid():
        raise OSError(f"the socket there is that of user {found.st_uid}")
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError("another server answers there")
    path.unlink()
