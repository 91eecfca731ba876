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

import numpy as np

from envserve.client.link.connection import SLICE_SECONDS, Connection
from envserve.client.link.server_pool import ServerPool
from envserve.errors import ConnectError, KeyFileError, RemoteProtocolError
from envserve.session.states import ClientState
from envserve.slab import Array
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer

if TYPE_CHECKING:
    from envserve.session.client.client_session import ClientSession

_LOGGER: Final = logging.getLogger(__name__)
#: Seconds without a connection after which a new socket is opened. libzmq reconnects
#: automatically, except after an error: a rejected key or a frame that is too long.
_RENEW_SECONDS: Final = 2.0
#: If a new socket connects within this time, the old one was probably disconnected by a
#: protocol error, not by an outage.
_QUICK_CONNECT_SECONDS: Final = 0.75
#: This many protocol errors within `_ERRORS_SECONDS` end the session.
_MAX_ERRORS: Final = 3
_ERRORS_SECONDS: Final = 10.0
#: Seconds of silence after which a lane leaves a server that may still hold its envs,
#: provided that another server has enough free envs.
_MAX_SILENCE_SECONDS: Final = 5.0
#: Time after which a lane moves even if some of its envs have not ended an episode yet.
_MOVE_SECONDS: Final = 30.0
#: Interval at which `SessionDriver.run` must be called while replies arrive in time. It
#: is long to save CPU time, but shorter than the session's timeouts.
_CHECK_SECONDS: Final = 0.5
#: Maximum duration of `SessionDriver.run`, so that its callers meet their deadlines.
_MAX_RUN_SECONDS: Final = 0.02


class SessionDriver:
    """Runs a session over a connection.

    Attributes:
      session: The session.
      connection: The connection to its server.
      server_pool: Servers for failover; None if there are no others.
      due_at: Time by which `run` must be called, as a value of `time.monotonic()`.
      is_moving: Whether `move_at_end` must be called before each step.
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
            num_envs = session.attachment.attach.num_hosted
            server_pool.placement.add(self, connection.address, num_envs)
        self.due_at = -math.inf
        self.is_moving = self._is_searching = False
        #: Mask of the rows that have ended an episode since `begin_move`, bool `[n]`.
        self._has_ended: Array = np.zeros(0, np.bool_)
        self._move_by = math.inf
        #: During a move, the DETACH for the previous server; otherwise empty.
        self._detach_frames: list[Buffer] = []
        self._is_connected = False
        self._is_renewed = False
        self._disconnected_since = time.monotonic()
        self._error_times: list[float] = []  # of recent protocol errors
        self._check_errors_at = math.inf

    def run(self, now: float) -> None:
        """Receive and send until there is nothing left to do; check the connection.

        libzmq's descriptor is edge-triggered: it signals the next message or
        disconnection only after a check has found nothing to read. Therefore this
        method reads until nothing is left. If that takes too long, `waker.wake` makes
        the descriptor readable, and the next call continues.
        """
        session, connection = self.session, self.connection
        if session.state.is_over:
            connection.flush(session.outbox)
            return
        until = time.monotonic() + _MAX_RUN_SECONDS
        is_out_of_time = False
        while not is_out_of_time:
            while not is_out_of_time and (frames := connection.receive()) is not None:
                session.receive(frames, now)
                is_out_of_time = time.monotonic() > until
            is_readable = self._check_connection(now)
            session.advance(now)
            # Send first, because a move discards the DETACH for a rejected server.
            has_sent = connection.flush(session.outbox)
            if self.server_pool is not None and self._fail_over(self.server_pool, now):
                continue
            if not has_sent and not is_readable:
                return
        self.due_at = now
        connection.waker.wake()

    def is_idle(self, now: float) -> bool:
        """Return whether `run` would find nothing to read, to send or to check.

        Like `run`, this makes libzmq's descriptor signal the next message.
        """
        return (
            now < self.due_at
            and not self.session.outbox
            and self._is_connected
            and self.connection.poll() == (False, True)
        )

    def _check_connection(self, now: float) -> bool:
        """Handle connection changes; return whether there is more to read."""
        connection = self.connection
        is_readable, is_connected = connection.poll()
        if is_connected and not self._is_connected:
            self._on_connected(now)
        elif self._is_connected and not is_connected:
            self._on_disconnected(now)
        self._check_repeated_errors(now)
        if connection.exceeds_limit(is_connected):
            text = "a message exceeds the protocol's size limit"
            self.session.abort(RemoteProtocolError(text))
            connection.flush(self.session.outbox)
            connection.disconnect()
            return False
        if (client_blocks := self.session.attachment.client_blocks) is not None:
            num_bytes = client_blocks.max_result_bytes
            connection.max_row_bytes = max(connection.max_row_bytes, num_bytes)
            self.raise_frame_limit(num_bytes, now)
        if not self._is_connected and now > self._disconnected_since + _RENEW_SECONDS:
            connection.renew()
            self._disconnected_since, self._is_renewed = now, True
        # Without a connection, `run` is due immediately, so that waiting messages are
        # sent as soon as a connection is established.
        self.due_at = now + _CHECK_SECONDS if self._is_connected else now
        return is_readable

    def raise_frame_limit(self, num_bytes: int, now: float) -> None:
        """Accept frames of up to `num_bytes`; open a new connection if necessary."""
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
        if self._is_renewed and now < self._disconnected_since + _QUICK_CONNECT_SECONDS:
            self._check_errors_at = now + _QUICK_CONNECT_SECONDS
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
        self._error_times = [
            each for each in self._error_times if now < each + _ERRORS_SECONDS
        ]
        self._error_times.append(now)
        if len(self._error_times) < _MAX_ERRORS:
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
        """Move to another server if needed and possible; return True after a move."""
        attachment = self.session.attachment
        since = attachment.needs_server_since(now)
        attachment.awaits_poll = since is not None and server_pool.polled_at < since
        placement = server_pool.placement
        if since is None:
            if self._is_searching:
                self._is_searching = False
                server_pool.end_search(self)
            if now >= server_pool.spread_at:
                server_pool.spread()
            return False
        if attachment.is_rejected:
            server_pool.exclude(self)
        is_gone = server_pool.is_gone(attachment.address, since)
        if attachment.awaits_poll:
            return False
        # If the server may still hold the envs, give it some time to reply.
        may_recover = not (is_gone or attachment.is_recovering)
        is_urgent = now >= attachment.give_up_at - 1.0
        if may_recover and not (is_urgent or now >= since + _MAX_SILENCE_SECONDS):
            return False
        previous, self._is_searching = placement.locations[self], True
        address = server_pool.assign(
            self,
            may_recover=may_recover,
            is_ungranted=attachment.granted_by != attachment.address,
            is_urgent=is_urgent,
        )
        if address is None:
            return False
        return self._move(server_pool, previous, address, now)

    def _move(
        self,
        server_pool: ServerPool,
        previous: str,
        address: str,
        now: float,
        reason: str = "",
    ) -> bool:
        """Move from the server `previous` to the one at `address`; return True.

        If the key of the new server is unknown, exclude that server, and return False.
        """
        self.is_moving = False
        try:  # get the keys before changing anything
            keys = self.connection.keys_for(address)
        except (ConnectError, KeyFileError) as error:
            _LOGGER.warning("cannot move envs to %s: %s", address, error)
            server_pool.exclude(self)
            server_pool.placement.locations[self] = previous
            return False
        self._detach_frames = self.session.requests.pack(MessageType.DETACH)
        self.session.attachment.move_to(address, now, reason)
        self.connection.move(address, keys, self._detach_frames)
        self._detach_frames = []
        self._error_times.clear()
        self._check_errors_at = math.inf
        self._on_disconnected(now)
        return True

    def complete_move(self, now: float) -> None:
        """Complete an interrupted move: connect to the session's current server."""
        address, connection = self.session.address, self.connection
        if self.server_pool is not None:
            self.server_pool.placement.locations[self] = address
        if self._detach_frames:
            connection.move(address, connection.keys_for(address), self._detach_frames)
            self._detach_frames = []
            self._on_disconnected(now)

    def begin_move(self, now: float) -> None:
        """Prepare for `move_at_end`, because the lane's target has granted envs."""
        self._has_ended = np.zeros(self.session.attachment.attach.num_envs, np.bool_)
        self._move_by = now + _MOVE_SECONDS
        self.is_moving = True

    def move_at_end(self, successor: ClientSession, now: float) -> None:
        """Move to the lane's target if, since `begin_move`, each env ended an episode.

        After 30 s, move in any case. Call this method before each step, while the rows
        still contain the results of the previous step. The session `successor` already
        holds a lease of the same envs on the target.
        """
        server_pool, attachment = self.server_pool, self.session.attachment
        client_blocks = self.session.client_blocks
        target = server_pool and server_pool.placement.targets.get(self)
        if server_pool is None or target != successor.address:
            self.is_moving = False  # the lane has lost its server in the meantime
            return
        rows = client_blocks.rows
        self._has_ended |= rows.terminated | rows.truncated
        if not (self._has_ended.all() or now >= self._move_by):
            return
        # Do not move while a call is in flight, because the call would fail.
        can_move = all(each.is_step for each in client_blocks.in_flight.values())
        sessions = (self.session, successor)
        is_ready = all(each.state is ClientState.READY for each in sessions)
        is_ready &= attachment.has_next_seeds(successor.attachment)
        if can_move and is_ready and attachment.needs_server_since(now) is None:
            previous = server_pool.placement.locations[self]
            address = server_pool.move(self)
            reason = f"its rows move to {address}, which has fewer rows of this batch"
            if self._move(server_pool, previous, address, now, reason):
                attachment.adopt_lease(successor.attachment, now)

    def wait(self, deadline: float) -> None:
        """Wait for a message until the earliest of three times.

        These are `deadline`, the session's next timer, and `SLICE_SECONDS` from now.
        """
        now = time.monotonic()
        until = min(deadline, self.session.next_deadline(), now + SLICE_SECONDS)
        wants_to_send = bool(self.session.outbox) or not self._is_connected
        self.connection.wait(until - now, for_writing=wants_to_send)
