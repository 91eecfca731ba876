"""Manages the keys of a server and of its authorised clients.

Authorisation fails closed: the server does not start until its socket has rejected an
unknown key.
"""

from __future__ import annotations

import asyncio
import logging
import threading
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
from envserve.server.clients_refresh import ClientsRefresh
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap
from envserve.wire.sockets import UNKNOWN_KEY, use_keys

_LOGGER: Final = logging.getLogger(__name__)
#: Time limit for the rejection of the self-test's connection, which uses an unknown
#: key.
_SELF_TEST_SECONDS: Final = 5.0


class Access:
    """The keys of a server and of its clients, read from their files.

    Attributes:
      keys: The server's key pair.
      clients: The file of authorised clients.
      refresh: Reads the file when it has changed.
    """

    def __init__(self, folder: KeyFolder) -> None:
        """Read all key files, and create key pairs that this user does not have yet.

        Raises:
          KeyFileError: A file cannot be read, or other users can read it.
        """
        self._now = time.time  # the wall clock, because keys expire on dates
        folder.ensure_key("client")
        self.keys = folder.ensure_key("server")
        self.clients = folder.clients
        self.clients.read()
        # Admitted pairs (user, public key), and those of them that were revoked later.
        self._admitted: set[tuple[str, bytes]] = set()
        self._revoked: set[tuple[str, bytes]] = set()
        self.refresh = ClientsRefresh(self.clients)
        # Threads that enrol clients wait for each other without a time limit. Only a
        # lock of another process is an error after a second.
        self._enrolment = threading.Lock()

    def check_binds(self, binds: Sequence[str]) -> None:
        """Raise KeyFileError if an address is not local and no client has a key."""
        for address in binds:
            if not (is_local_address(address) or self.clients.grants(self._now())):
                raise KeyFileError(
                    f"{address} is reachable from other hosts, but no client has a key "
                    f'yet; run "envserve invite NAME --at ADDRESS" first, or bind to '
                    f"tcp://127.0.0.1"
                )

    def find_grant(self, public: bytes) -> Grant | None:
        """Return the grant of a key; None if the key is definitely unknown.

        Raises:
          KeyFileError: The key may become valid: either the clients file cannot be
            read now, or the user's previous key is still being revoked.
        """
        grant = self.clients.find(public, self._now())
        if grant is None and (self.refresh.is_running or not self.clients.is_current):
            raise KeyFileError("the clients file cannot be read now")
        if grant is not None and not grant.is_invitation:
            entry = grant.name, public
            if any(name == grant.name for name, _ in self._admitted - {entry}):
                raise KeyFileError(f"{grant.name}: a previous key is still in use")
            self._admitted.add(entry)
        return grant

    def grant_of(self, user: str) -> Grant | None:
        """Return the grant of a user; None if its key has expired or was revoked."""
        return self.clients.find_name(user, self._now())

    def enrol(self, user: str, public: bytes) -> str:
        """Replace an invitation with the invited client's public key; thread-safe.

        Args:
          user: User of the client's connection: the encoded key of the invitation.
          public: The client's public key.

        Returns:
          The name for which the invitation was issued; it is now the client's name.

        Raises:
          RemoteProtocolError: The invitation is invalid, was already used, or has
            expired.
          KeyFileError: The clients file cannot be changed.
        """
        grant = None
        if user.startswith(formats.INVITATION):
            invitation = formats.decode(formats.INVITATION, user)
            with self._enrolment:
                grant = self.clients.enrol(invitation, public, self._now())
        if grant is None:
            raise RemoteProtocolError("expected the key of a valid invitation")
        _LOGGER.info("%s joined, key %s", grant.name, formats.fingerprint(public))
        return grant.name

    def find_revoked(self) -> set[str]:
        """Return the users who were admitted with a key that is no longer valid.

        This also starts a refresh of the clients file, for the next call.
        """
        self.refresh.start()
        now = self._now()
        for user, public in self._admitted:
            grant = self.clients.find(public, now)
            if grant is None or grant.name != user:
                self._revoked.add((user, public))
        return {user for user, _ in self._revoked}

    def forget_revoked(self) -> None:
        """Forget revoked users, so that they can connect with new keys.

        Call this once their sessions have ended and their connections are closed.
        """
        self._admitted -= self._revoked
        self._revoked.clear()


async def run_self_test(sockets: ServerSockets, zap: Zap, server_public: bytes) -> None:
    """Connect with an unknown key; raise SelfTestError unless it is rejected."""
    zap.is_quiet = True
    with sockets.listening_on_loopback() as address:
        failure = await asyncio.to_thread(_try_unknown_key, address, server_public)
    zap.is_quiet = False
    zap.counts.clear()
    if failure or sockets.has_unread():
        raise SelfTestError(
            f"self-test: expected an unknown key to be rejected, but "
            f"{failure or 'its message was received'}. The server does not start, "
            f"because anyone could connect. Check that programs on this host can "
            f"connect to 127.0.0.1; if they can, please report this bug."
        )


def _try_unknown_key(address: str, server_public: bytes) -> str:
    """Connect with a new key; return "" if it is rejected, otherwise an explanation."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    use_keys(socket, server_public, KeyPair.generate())
    monitor = socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    try:
        socket.connect(address)
        with suppress(zmq.Again):  # the key may already have been rejected
            socket.send(b"?", zmq.NOBLOCK)
        if not monitor.poll(int(1000 * _SELF_TEST_SECONDS)):
            return f"there was no reply within {_SELF_TEST_SECONDS:g} s"
        event = recv_monitor_message(monitor)
        is_rejected = (
            event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            and event["value"] == UNKNOWN_KEY
        )
        if is_rejected:
            return ""
        return f"ZeroMQ reported {event['event']!r} with value {event['value']}"
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)
