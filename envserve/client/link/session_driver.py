"""I/O of a client session: messages, reconnection, and failover to another server.

`ClientSession` implements the protocol without I/O. The driver passes received messages
and connection changes to it, and sends the messages in its outbox. Callers of any
method must hold the lane's lock.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from envserve.client.link.connection import SLICE_SECONDS, Connection
from envserve.client.link.server_pool import ServerPool
from envserve.errors import ConnectError, KeyFileError, RemoteProtocolError

if TYPE_CHECKING:
    from envserve.session.client.client_session import ClientSession


_LOGGER: Final = logging.getLogger(__name__)
#: Seconds without a connection after which a new socket is opened. libzmq reconnects
#: automatically, except after an error: a rejected key or a frame that is too long.
_RENEW_SECONDS: Final = 2.0
#: If a new socket connects within this time, such an error has probably occurred.
_AT_ONCE_SECONDS: Final = 0.75
#: This many errors within `_ERRORS_SECONDS` end the session.
_MAX_ERRORS: Final = 3
_ERRORS_SECONDS: Final = 10.0
#: Maximum duration of `SessionDriver.run`, so that its callers meet their deadlines.
_RUN_SECONDS: Final = 0.02


class SessionDriver:
    """Runs a session over a connection.

    Attributes:
      session: The session.
      connection: The connection to its server.
      server_pool: Servers for failover; None if there are no others.
      due_at: Time by which `run` must be called, as a value of `time.monotonic()`.
    """

    def __init__(
        self,
        session: ClientSession,
        connection: Connection,
        server_pool: ServerPool | None = None,
    ) -> None:
        self.session = session
        self.connection = connection
        self.server_pool = server_pool
        if server_pool is not None:
            server_pool.locations[self] = connection.address
        self.due_at = -math.inf
        self._is_connected = False
        self._is_renewed = False
        self._disconnected_since = time.monotonic()
        self._errors: list[float] = []  # when each was detected
        self._check_errors_at = math.inf

    def run(self, now: float) -> None:
        """Receive and send until there is nothing left to do; check the connection.

        libzmq's descriptor is edge-triggered: it signals the next message or
        disconnection only after a check has found nothing to read. Therefore this
        method runs until then. If that takes too long, `waker.wake` makes the
        descriptor readable, and the next call continues.
        """
        session, connection = self.session, self.connection
        if session.state.is_over:
            connection.flush(session.outbox)
            return
        until = time.monotonic() + _RUN_SECONDS
        is_late = False
        while not is_late:
            while not is_late and (frames := connection.receive()) is not None:
                session.receive(frames, now)
                is_late = time.monotonic() > until
            is_readable = self._check_connection(now)
            session.advance(now)
            if self.server_pool is not None and self._fail_over(self.server_pool, now):
                continue
            if not connection.flush(session.outbox) and not is_readable:
                return
        self.due_at = now
        connection.waker.wake()

    def _check_connection(self, now: float) -> bool:
        """Handle connection changes; return whether there is more to read."""
        is_readable, is_connected = self.connection.poll()
        if is_connected and not self._is_connected:
            self._on_connected(now)
        elif self._is_connected and not is_connected:
            self._on_disconnected(now)
        self._check_repeated_errors(now)
        if self.connection.exceeds_limit(is_connected):
            text = "a message exceeds the protocol's size limit"
            self.session.abort(RemoteProtocolError(text))
            self.connection.flush(self.session.outbox)
            self.connection.disconnect()
            return False
        if (operations := self.session.attachment.client_blocks) is not None:
            most = operations.max_result_bytes
            self.connection.max_row_bytes = max(self.connection.max_row_bytes, most)
            self.accept(most, now)
        if not self._is_connected and now > self._disconnected_since + _RENEW_SECONDS:
            self.connection.renew()
            self._disconnected_since, self._is_renewed = now, True
        # Without a connection, call `run` again at once, so that waiting messages are
        # sent as soon as there is one.
        self.due_at = now + SLICE_SECONDS if self._is_connected else now
        return is_readable

    def accept(self, num_bytes: int, now: float) -> None:
        """Accept frames of this size, with a new connection if necessary."""
        if num_bytes > self.connection.max_frame_bytes:
            self.connection.renew(num_bytes)
            self._on_disconnected(now)
            self.due_at = now

    def _on_disconnected(self, now: float) -> None:
        self._is_connected = self._is_renewed = False
        self._disconnected_since = now
        self.session.record_disconnect(now)

    def _on_connected(self, now: float) -> None:
        self._is_connected = True
        if self._is_renewed and now < self._disconnected_since + _AT_ONCE_SECONDS:
            self._check_errors_at = now + _AT_ONCE_SECONDS
        self.session.record_connect(now)

    def _check_repeated_errors(self, now: float) -> None:
        """End the session if several connections in a row have failed with an error.

        If the network was only interrupted, the previous socket reconnects, and that
        does not count as an error.
        """
        if self._check_errors_at < math.inf and self.connection.is_previous_connected():
            self._check_errors_at = math.inf
            self.connection.close_previous()
        if now < self._check_errors_at:
            return
        self._check_errors_at = math.inf
        self._errors = [at for at in self._errors if now < at + _ERRORS_SECONDS]
        self._errors.append(now)
        if len(self._errors) < _MAX_ERRORS:
            return
        self.session.abort(
            RemoteProtocolError(
                f"{_MAX_ERRORS} connections in a row ended with a protocol error. "
                f"Expected ZeroMQ messages with frames of at most "
                f"{self.connection.max_frame_bytes} bytes; check that an envserve "
                f"server is listening there"
            )
        )

    def _fail_over(self, server_pool: ServerPool, now: float) -> bool:
        """Move to another server if one is needed and found; return whether it did."""
        attachment = self.session.attachment
        since = attachment.needs_server_since(now)
        attachment.awaits_poll = since is not None and server_pool.polled_at < since
        if since is None:
            return False
        if attachment.is_rejected:
            server_pool.exclude(self)
        # If the server may still have the envs, wait for it until just before the time
        # limit.
        is_lost = attachment.is_recovering or now >= attachment.give_up_at - 1.0
        if not (server_pool.is_gone(attachment.address, since) or is_lost):
            return False
        num_envs, alone = attachment.attach.num_hosted, not attachment.granted_by
        before = server_pool.locations[self]
        if (found := server_pool.take(self, num_envs, alone=alone)) is None:
            return False
        try:  # get the keys before changing anything
            keys = self.connection.keys_for(found)
        except (ConnectError, KeyFileError) as error:
            _LOGGER.warning("cannot move envs to %s: %s", found, error)
            server_pool.exclude(self)
            server_pool.locations[self] = before
            return False
        self.connection.move(found, keys, attachment.move_to(found, now))
        self._errors.clear()
        self._check_errors_at = math.inf
        self._on_disconnected(now)
        return True

    def wait(self, deadline: float) -> None:
        """Wait for a message, the session's next deadline, or `SLICE_SECONDS`."""
        now = time.monotonic()
        until = min(deadline, self.session.next_deadline(), now + SLICE_SECONDS)
        wants_to_send = bool(self.session.outbox) or not self._is_connected
        self.connection.wait(until - now, for_writing=wants_to_send)
