"""Who may use a server's tcp addresses: its keys, its clients, and who was revoked.

Closed in doubt: nothing is served if a key that nobody knows was not refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from envserve.address import is_local_address
from envserve.errors import KeyFileError, RemoteProtocolError, SelfTestError
from envserve.keys import formats
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap
from envserve.wire.sockets import UNKNOWN_KEY, use_keys

_LOGGER: Final = logging.getLogger(__name__)
_SELF_TEST_SECONDS: Final = 5.0


class Access:
    """The keys of a server and of its clients, as files say now.

    Attributes:
      keys: The server's own.
    """

    def __init__(self, folder: KeyFolder) -> None:
        """Reads all, and makes the keys of this user that are missing.

        Raises:
          KeyFileError: A file cannot be read, or others can.
        """
        self._now = time.time  # keys end on dates
        folder.ensure_key("client")
        self.keys = folder.ensure_key("server")
        self.clients = folder.clients
        self.clients.read()
        self._admitted: set[tuple[str, bytes]] = set()  # users and keys
        self._revoked: set[tuple[str, bytes]] = set()

    def check_binds(self, binds: Sequence[str]) -> None:
        """Raises KeyFileError if others could reach it, and none of them has a key."""
        for address in binds:
            if not (is_local_address(address) or self.clients.grants(self._now())):
                raise KeyFileError(
                    f"{address} can be reached from other hosts, and no client has a "
                    f'key yet; run "envserve invite NAME" first, or bind to '
                    f"tcp://127.0.0.1"
                )

    def find(self, public: bytes) -> Grant | None:
        """Returns what a key may; None if it surely is not known.

        Raises:
          KeyFileError: It is not known, but the file cannot be read now. Or it is of a
            name that was let in with another key, which is about to be shut out.
        """
        grant = self.clients.find(public, self._now())
        if grant is None and not self.clients.is_current:
            raise KeyFileError("the file of clients cannot be read now")
        if grant is not None and not grant.is_invitation:
            entry = grant.name, public
            if any(name == grant.name for name, _ in self._admitted - {entry}):
                raise KeyFileError(f"{grant.name} has had another key until now")
            self._admitted.add(entry)
        return grant

    def grant_of(self, user: str) -> Grant | None:
        """Returns what the key of a user may; None if it is not good any more."""
        for grant in self.clients.grants(self._now()):
            if grant.name == user and not grant.is_invitation:
                return grant
        return None

    def enrol(self, user: str, public: bytes) -> str:
        """Replace an invitation by the key of the client that was invited.

        Returns:
          The name of the user.

        Raises:
          RemoteProtocolError: It came by none that is good now.
          KeyFileError: The file of clients cannot be changed.
        """
        grant = None
        if user.startswith(formats.INVITATION):
            invitation = formats.decode(formats.INVITATION, user)
            grant = self.clients.enrol(invitation, public, self._now())
        if grant is None:
            raise RemoteProtocolError("expected the key of an invitation that is good")
        _LOGGER.info("%s joined, key %s", grant.name, formats.fingerprint(public))
        return grant.name

    def find_revoked(self) -> set[str]:
        """Returns users who were let in with a key that is not theirs any more."""
        now = self._now()
        for user, public in self._admitted:
            grant = self.clients.find(public, now)
            if grant is None or grant.name != user:
                self._revoked.add((user, public))
        return {user for user, _ in self._revoked}

    def forget_revoked(self) -> None:
        """Notes that nothing of them is left: they may come back with other keys."""
        self._admitted -= self._revoked
        self._revoked.clear()


async def check_refusal(sockets: ServerSockets, zap: Zap, server_public: bytes) -> None:
    """Connect with an unknown key; raise SelfTestError unless it is refused."""
    zap.is_quiet = True
    with sockets.listening_on_loopback() as address:
        found = await asyncio.to_thread(_knock, address, server_public)
    zap.is_quiet = False
    zap.counts.clear()
    if found or sockets.has_unread():
        raise SelfTestError(
            f"expected a key that nobody knows to be refused; "
            f"{found or 'it was read'}; nothing is served, since anybody could get in; "
            f"please report this"
        )


def _knock(address: str, server_public: bytes) -> str:
    """Connects with a new key; returns "" if that was refused, else what happened."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    use_keys(socket, server_public, KeyPair.generate())
    monitor = socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    try:
        socket.connect(address)
        with suppress(zmq.Again):  # it was refused before it could say a word
            socket.send(b"?", zmq.NOBLOCK)
        if not monitor.poll(int(1000 * _SELF_TEST_SECONDS)):
            return f"there was no answer within {_SELF_TEST_SECONDS:g} s"
        event = recv_monitor_message(monitor)
        is_refused = (
            event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            and event["value"] == UNKNOWN_KEY
        )
        return "" if is_refused else f"ZeroMQ said {event['event']!r}, {event['value']}"
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)
