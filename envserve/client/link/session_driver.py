"""Moves messages between a session and a server: the one it has, or another one."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from envserve.client.link.connection import SLICE_SECONDS, Connection
from envserve.client.link.server_pool import Fleet
from envserve.errors import ConnectError, KeyFileError, RemoteProtocolError

if TYPE_CHECKING:
    from envserve.session.client.client_session import ClientSession

__all__ = ["Exchange"]

_LOGGER: Final = logging.getLogger(__name__)
#: After how long without a connection its socket is made anew. ZeroMQ tries again by
#: itself, but never after an error: of a refused key, or of a frame that is too long.
_RENEW_SECONDS: Final = 2.0
#: A new socket that connects so soon tells that there was such an error; and how many
#: of them within how long are no accident.
_AT_ONCE_SECONDS: Final = 0.75
_MAX_ERRORS: Final = 3
_ERRORS_SECONDS: Final = 10.0
#: How long `Exchange.run` may take, so that its callers keep their deadlines.
_RUN_SECONDS: Final = 0.02


class Exchange:
    """Moves messages between a session and its connection, to whichever server.

    Attributes:
      session: The session.
      connection: The connection.
      fleet: Other servers, if there may be any.
      due_at: When to `run` at the latest: to see breaks, and to do what is due.
    """

    def __init__(
        self, session: ClientSession, connection: Connection, fleet: Fleet | None = None
    ) -> None:
        """Joins them."""
        self.session = session
        self.connection = connection
        self.fleet = fleet
        if fleet is not None:
            fleet.places[self] = connection.address
        self.due_at = -math.inf
        self._is_connected = False
        self._is_renewed = False
        self._alone_since = time.monotonic()
        self._errors: list[float] = []  # when it was seen that there was one
        self._judge_at = math.inf

    def run(self, now: float) -> None:
        """Receives and sends until neither goes on, and looks at the connection.

        Ends with a look that finds nothing: only then is the next message, or break,
        sure to show at the descriptor, which shows nothing twice. Or after a while, if
        there is no end: then the descriptor is awake, and the next call goes on.
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
            is_readable = self._look(now)
            session.advance(now)
            if self.fleet is not None and self._seek(self.fleet, now):
                continue
            if not connection.flush(session.outbox) and not is_readable:
                return
        self.due_at = now
        connection.descriptor.wake()

    def _look(self, now: float) -> bool:
        """Tells the session of the connection, and the caller whether there is more."""
        is_readable, is_connected = self.connection.look()
        if is_connected and not self._is_connected:
            self._note_connected(now)
        elif self._is_connected and not is_connected:
            self._note_disconnected(now)
        self._judge(now)
        if self.connection.is_endless(is_connected):
            text = "expected messages that end; got one that does not"
            self.session.refuse(RemoteProtocolError(text))
            self.connection.flush(self.session.outbox)
            self.connection.drop()
            return False
        if (operations := self.session.attachment.operations) is not None:
            most = operations.max_result_bytes
            self.connection.max_row_bytes = max(self.connection.max_row_bytes, most)
            self.accept(most, now)
        if not self._is_connected and now > self._alone_since + _RENEW_SECONDS:
            self.connection.renew()
            self._alone_since, self._is_renewed = now, True
        # While there is none, a message that waits can be sent at any moment.
        self.due_at = now + SLICE_SECONDS if self._is_connected else now
        return is_readable

    def accept(self, num_bytes: int, now: float) -> None:
        """Has frames of so many bytes be received, by a new connection if needed."""
        if num_bytes > self.connection.max_frame_bytes:
            self.connection.renew(num_bytes)
            self._note_disconnected(now)
            self.due_at = now

    def _note_disconnected(self, now: float) -> None:
        self._is_connected = self._is_renewed = False
        self._alone_since = now
        self.session.disconnected(now)

    def _note_connected(self, now: float) -> None:
        """Notes a connection, and that it may tell of an error."""
        self._is_connected = True
        if self._is_renewed and now < self._alone_since + _AT_ONCE_SECONDS:
            self._judge_at = now + _AT_ONCE_SECONDS
        self.session.connected(now)

    def _judge(self, now: float) -> None:
        """Ends the session if an error follows each connection.

        If the network was away, the former socket connects as well, by itself.
        """
        if self._judge_at < math.inf and self.connection.has_former_connected():
            self._judge_at = math.inf
            self.connection.forget_former()
        if now < self._judge_at:
            return
        self._judge_at = math.inf
        self._errors = [at for at in self._errors if now < at + _ERRORS_SECONDS]
        self._errors.append(now)
        if len(self._errors) < _MAX_ERRORS:
            return
        self.session.refuse(
            RemoteProtocolError(
                f"expected ZeroMQ's protocol, and frames of at most "
                f"{self.connection.max_frame_bytes} bytes; {_MAX_ERRORS} connections "
                f"one after the other have ended by an error; is that an envserve "
                f"server?"
            )
        )

    def _seek(self, fleet: Fleet, now: float) -> bool:
        """Begins to turn to another server, if need be and one has room; or not."""
        attachment = self.session.attachment
        since = attachment.in_need_since(now)
        attachment.awaits_look = since is not None and fleet.looked_at < since
        if since is None:
            return False
        if attachment.is_unfit:
            fleet.shun(self)
        # Envs that may be there yet are waited for: until just before it is given up.
        is_lost = attachment.is_recovering or now >= attachment.lost_at - 1.0
        if not (fleet.is_gone(attachment.address, since) or is_lost):
            return False
        num_envs, alone = attachment.attach.num_hosted, not attachment.home
        before = fleet.places[self]
        if (found := fleet.take(self, num_envs, alone=alone)) is None:
            return False
        try:  # before anything is changed
            keys = self.connection.keys_for(found)
        except (ConnectError, KeyFileError) as error:
            _LOGGER.warning("%s gets no rows: %s", found, error)
            fleet.shun(self)
            fleet.places[self] = before
            return False
        self.connection.move(found, keys, attachment.move(found, now))
        self._errors.clear()
        self._judge_at = math.inf
        self._note_disconnected(now)
        return True

    def wait(self, deadline: float) -> None:
        """Waits for the server, the session's next deadline, or a little while."""
        now = time.monotonic()
        until = min(deadline, self.session.next_deadline(), now + SLICE_SECONDS)
        wants_to_send = bool(self.session.outbox) or not self._is_connected
        self.connection.wait(until - now, for_writing=wants_to_send)
