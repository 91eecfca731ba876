"""Authenticates connections to a context's sockets (ZAP, ZeroMQ RFC 27).

Every request gets a reply: 200 with the user's name for a known key, 400 for a key that
is definitely unknown, and 300 in all other cases, including internal errors. After 400
the client's socket stops connecting; after 300 it tries again. Authentication fails
closed: only a reply with 200 admits a client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from envserve.errors import KeyFileError
from envserve.keys import formats
from envserve.keys.grant import Grant
from envserve.session.server.decisions import Audit
from envserve.text import LogThrottle
from envserve.wire.sockets import NOBLOCK, event_fd

_LOGGER: Final = logging.getLogger(__name__)
#: ZAP domain. Sockets must enforce it, otherwise ZeroMQ admits unknown keys.
DOMAIN: Final = b"envserve"
_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
#: Number of frames of a CURVE request; the last frame is the raw public key.
_NUM_FRAMES: Final = 7
_KEY_BYTES: Final = 32
#: Maximum seconds to reply to requests before other callbacks of the loop get their
#: turn.
_TURN_SECONDS: Final = 0.002
#: Interval in seconds for checking whether `find` uses the current grants.
_WAIT_SECONDS: Final = 0.001


def user_of(grant: Grant) -> str:
    """Return a grant's user: the client's name, or an invitation's encoded key."""
    if grant.is_invitation:
        return formats.encode(formats.INVITATION, grant.public)
    return grant.name


class Zap:
    """ZAP handler that admits the keys for which `find` returns a grant.

    Attributes:
      counts: Number of replies by status.
      num_admitted: Number of admitted connections by user, since the last call to
        `take_suspect`.
      addresses: Address of each user's latest connection.
      is_quiet: Whether to omit rejections from the log and the audit log.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        find: Callable[[bytes], Grant | None],
        loop: asyncio.AbstractEventLoop,
        is_shut_out: Callable[[str], bool] = lambda user: False,
        audit: Callable[[Audit], None] = lambda event: None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start replying. Sockets of the context must not listen before this.

        Args:
          context: ZeroMQ context of the sockets.
          find: Returns the grant of a public key, or None; may raise KeyFileError.
          loop: Event loop that reads the requests.
          is_shut_out: Returns whether to reject a user temporarily.
          audit: Callback that records an event in the audit log.
          is_ready: Returns whether `find` uses the current grants; until it does,
            requests wait.
        """
        self._audit = audit
        self._is_ready = is_ready
        self._is_shut_out = is_shut_out
        self.num_admitted: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.addresses: dict[str, str] = {}
        self.is_quiet = False
        self._find = find
        self._loop = loop
        self._throttle = LogThrottle()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self._scheduled: asyncio.Handle | None = None
        loop.add_reader(event_fd(self._socket), self._on_requests)

    def close(self) -> None:
        """Stop replying; from now on no client can connect."""
        self._loop.remove_reader(event_fd(self._socket))
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._socket.close()

    def take_suspect(self, min_connections: int) -> str:
        """Return the user who made at least 60 % of new connections; reset the counts.

        Args:
          min_connections: Minimum number of connections that this user must have made.
            Every client reconnects after all connections were closed, so a few
            connections are not suspicious.

        Returns:
          The user; "" if there is none.
        """
        admitted, self.num_admitted = self.num_admitted, Counter()
        ((user, count),) = admitted.most_common(1) or [("", 0)]
        return user if count >= max(min_connections, admitted.total() * 0.6) else ""

    def _on_requests(self) -> None:
        """Reply to requests until the turn is over or no request is left.

        The descriptor is edge-triggered: it does not report requests that were left
        unread. Schedule another call for these.
        """
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled, delay = None, 0.0
        turn_ends_at = time.monotonic() + _TURN_SECONDS
        try:
            if not self._is_ready():
                delay = _WAIT_SECONDS
                return
            while time.monotonic() < turn_ends_at:
                try:
                    frames = self._socket.recv_multipart(NOBLOCK)
                except zmq.Again:
                    delay = math.inf
                    return
                self._reply(frames)
        finally:
            if delay < math.inf:
                self._scheduled = self._loop.call_later(delay, self._on_requests)

    def _reply(self, frames: Sequence[bytes]) -> None:
        status, user = "300", ""
        try:
            status, user = self._decide(frames)
        except KeyFileError as error:
            more = self._throttle.admit(KeyFileError, time.monotonic())
            if more is not None:
                _LOGGER.warning(
                    "a client must retry, because its key could not be checked: %s%s",
                    error,
                    more,
                )
        except Exception as error:
            more = self._throttle.admit(type(error), time.monotonic())
            if more is not None:
                _LOGGER.exception("failed to check a key%s", more)
        self.counts[status] += 1
        request = frames[1] if len(frames) > 1 else b""
        text = "" if user else "unknown key, or rejected temporarily"
        fields = [field.encode() for field in (status, text, user)]
        self._socket.send_multipart([_VERSION, request, *fields, b""], NOBLOCK)

    def _decide(self, frames: Sequence[bytes]) -> tuple[str, str]:
        """Return the ZAP status code, and the user if the code is 200."""
        if (
            len(frames) != _NUM_FRAMES
            or (frames[0], frames[2], frames[5]) != (_VERSION, DOMAIN, b"CURVE")
            or len(frames[6]) != _KEY_BYTES
        ):
            return "300", ""
        grant = self._find(frames[6])
        if grant is not None:
            user = user_of(grant)
            if self._is_shut_out(user):
                return "300", ""
            self.num_admitted[user] += 1
            self.addresses[user] = frames[3].decode(errors="replace")
            return "200", user
        self._report_rejection(frames[6], frames[3])
        return "400", ""

    def _report_rejection(self, public: bytes, address: bytes) -> None:
        """Record a rejection in the audit log, and log at most one per second."""
        if self.is_quiet:
            return
        key, client = formats.fingerprint(public), address.decode(errors="replace")
        reason = "unknown key"
        self._audit(Audit("refused", reason=reason, fingerprint=key, address=client))
        more = self._throttle.admit("refused", time.monotonic())
        if more is not None:
            _LOGGER.info("%s %s from %s%s", reason, key, client, more)
