"""Answers ZeroMQ's question who may connect (ZAP, RFC 27), for a context's sockets.

Every request is answered: 200 with the user's name for a key that is known, 400 for one
that surely is not, and 300 for every doubt of ours: 400 makes a client's socket give up
for good, 300 makes it ask again. Whatever fails here, nobody gets in who was not told.
"""

from __future__ import annotations

import asyncio
import logging
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
#: Without a name, or if it is not enforced, ZeroMQ lets everybody in at times.
DOMAIN: Final = b"envserve"
_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_NUM_FRAMES: Final = 7  # of a CURVE request; the last is the raw public key
_KEY_BYTES: Final = 32
_REQUESTS_AT_ONCE: Final = 64


def user_of(grant: Grant) -> str:
    """Returns who a key's messages are from; of an invitation, its public key."""
    if grant.is_invitation:
        return formats.encode(formats.INVITATION, grant.public)
    return grant.name


class Zap:
    """Lets those in whose key `find` knows.

    Attributes:
      counts: How often which status was answered.
      entered: How often each user was let in, since `take_suspect`.
      addresses: Where each user was let in from last.
      is_quiet: Whether refusals are neither logged nor audited.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        find: Callable[[bytes], Grant | None],
        loop: asyncio.AbstractEventLoop,
        is_shut_out: Callable[[str], bool] = lambda user: False,
        audit: Callable[[Audit], None] = lambda event: None,
    ) -> None:
        """Start to answer; no socket of the context may listen before.

        Args:
          context: ZeroMQ context of the sockets.
          find: Returns the grant of a public key, or None; may raise.
          loop: Event loop that reads the requests.
          is_shut_out: Returns whether to refuse a user for now, though its key is good.
          audit: Takes events for the audit log.
        """
        self._audit = audit
        self._is_shut_out = is_shut_out
        self.entered: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.addresses: dict[str, str] = {}
        self.is_quiet = False
        self._find = find
        self._loop = loop
        self._throttle = LogThrottle()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self._planned: asyncio.Handle | None = None
        loop.add_reader(event_fd(self._socket), self._on_requests)

    def close(self) -> None:
        """Answers no more: then nobody gets in."""
        self._loop.remove_reader(event_fd(self._socket))
        if self._planned is not None:
            self._planned.cancel()
        self._socket.close()

    def take_suspect(self, many: int) -> str:
        """Returns who made at least so many connections, and most; counts anew.

        All come back after each time, so that few show nothing. "" if nobody did.
        """
        entered, self.entered = self.entered, Counter()
        ((user, count),) = entered.most_common(1) or [("", 0)]
        return user if count >= max(many, entered.total() * 0.6) else ""

    def _on_requests(self) -> None:
        """Answers until none is left: the descriptor shows an edge only."""
        self._planned = None
        may_be_more = True
        try:
            for _ in range(_REQUESTS_AT_ONCE):
                try:
                    frames = self._socket.recv_multipart(NOBLOCK)
                except zmq.Again:
                    may_be_more = False
                    return
                self._answer(frames)
        finally:
            if may_be_more:
                self._planned = self._loop.call_soon(self._on_requests)

    def _answer(self, frames: Sequence[bytes]) -> None:
        status, user = "300", ""
        try:
            status, user = self._judge(frames)
        except KeyFileError as error:
            more = self._throttle.admit(KeyFileError, time.monotonic())
            if more is not None:
                _LOGGER.warning("who knocks may try again: %s%s", error, more)
        except Exception as error:
            more = self._throttle.admit(type(error), time.monotonic())
            if more is not None:
                _LOGGER.exception("it could not be found out who knocks%s", more)
        self.counts[status] += 1
        request = frames[1] if len(frames) > 1 else b""
        text = "" if user else "not known here, or not now"
        words = [word.encode() for word in (status, text, user)]
        self._socket.send_multipart([_VERSION, request, *words, b""], NOBLOCK)

    def _judge(self, frames: Sequence[bytes]) -> tuple[str, str]:
        """Returns the status and the user."""
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
            self.entered[user] += 1
            self.addresses[user] = frames[3].decode(errors="replace")
            return "200", user
        self._report_refusal(frames[6], frames[3])
        return "400", ""

    def _report_refusal(self, public: bytes, address: bytes) -> None:
        """Write a refusal to the audit log, and log at most one a second."""
        if self.is_quiet:
            return
        key, place = formats.fingerprint(public), address.decode(errors="replace")
        reason = f"key {key}, from {place}, is not known here"
        self._audit(Audit("refused", "", reason=reason))
        more = self._throttle.admit("refused", time.monotonic())
        if more is not None:
            _LOGGER.info("%s%s", reason, more)
