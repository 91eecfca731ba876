"""When a client considers its server unresponsive, and its lease lost.

Silence is counted from the first message that is not answered, so a client that was
suspended does not blame the server for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from envserve.errors import EnvserveError, RemoteProtocolError, ServerLost
from envserve.wire.message import Buffer

#: Seconds without a message until the client sends a PING.
PING_SECONDS: Final = 1.0
#: Silence after a request until a server counts as unreachable.
_UNREACHABLE_SECONDS: Final = 3.5
#: Time without a connection until a server counts as unreachable.
_DISCONNECTED_SECONDS: Final = 1.0
#: Longer than the client ever waits. After such a gap the client itself was suspended.
_SUSPENDED_SECONDS: Final = 5.0
#: Unsolicited messages that are accepted per second, and copies of each piece of an
#: answer that are accepted on top, because a server may have been stopped for a minute.
_MAX_UNSOLICITED: Final = 1000
_MAX_COPIES: Final = 32


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a client waits for its server, and how much memory it spends."""

    connect_seconds: float = 10.0
    """Longest silence before the envs are granted."""
    lost_seconds: float = 60.0
    """Longest silence, or wait for lost envs, after that."""
    pads: bool = False
    """Whether to continue to ask after that, with `given_up` set, instead of ending."""
    max_row_mib: int = 1024
    """Most memory for the rows of its envs, whose size the server chooses."""


@dataclass(slots=True)
class LostLease:
    """A lease that was lost, until another one works.

    Attributes:
      error: Why it was lost.
      since: When it was lost.
      given_up: Why waiting for the envs has no prospect any more.
      retry_at: When to ask again.
      busy_until: How long to ask while other clients have the envs.
      farewell: Message that frees the old lease; may be empty.
    """

    error: EnvserveError
    since: float
    given_up: ServerLost | None = None
    retry_at: float = math.inf
    busy_until: float = math.inf
    farewell: list[Buffer] = field(default_factory=list)


class Liveness:
    """How long the server has not answered, as far as the server is to blame.

    Attributes:
      silent_since: When the first unanswered message was sent; infinity if none was.
      disconnected_since: When the connection broke; infinity while there is one.
      ping_at: When to send a PING.
      is_unreachable: Whether the server was silent, or disconnected, for so long that
        callers should not wait for it; until its next message.
      silent_seconds: Total length of the silences that were longer than a PING takes.
    """

    def __init__(self, now: float) -> None:
        self.silent_since, self.disconnected_since = now, math.inf
        self.ping_at = math.inf
        self.is_unreachable = False
        self.silent_seconds = 0.0
        self._awake_at = now

    def note_message(self, now: float) -> None:
        """Record that the server has sent a message."""
        if now - self.silent_since > PING_SECONDS:
            self.silent_seconds += now - self.silent_since
        self.silent_since = math.inf
        self.ping_at = now + PING_SECONDS
        self.is_unreachable = False

    def expect_answer(self, now: float) -> None:
        """Record that a message was sent that the server has to answer."""
        self.silent_since = min(self.silent_since, now)

    def note_ping(self, now: float) -> None:
        """Record that a PING was sent."""
        self.ping_at = now + PING_SECONDS
        self.expect_answer(now)

    def note_disconnected(self, now: float) -> None:
        """Record that the connection is broken."""
        self.disconnected_since = min(self.disconnected_since, now)

    def note_connected(self) -> None:
        """Record that there is a connection again."""
        self.disconnected_since = math.inf

    def note_awake(self, now: float) -> None:
        """Record that the client runs; do not count time in which it did not."""
        if now - self._awake_at > _SUSPENDED_SECONDS:
            if self.silent_since < math.inf:
                self.silent_since = now
            if self.disconnected_since < math.inf:
                self.disconnected_since = now
        self._awake_at = now

    @property
    def unreachable_at(self) -> float:
        """When the server will count as unreachable; infinity if it does already."""
        if self.is_unreachable:
            return math.inf
        disconnected_at = self.disconnected_since + _DISCONNECTED_SECONDS
        return min(self.silent_since + _UNREACHABLE_SECONDS, disconnected_at)


class UnsolicitedLimit:
    """Limits the messages per second that answer no request.

    These are signs of life, notices about the lease, and late answers. An envserve
    server sends few of them.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._count = 0

    def count(
        self, what: int | str, num_bytes: int, num_pieces: int, now: float
    ) -> None:
        """Count a message, a long one several times.

        Args:
          what: Type of the message.
          num_bytes: Its length.
          num_pieces: See `ClientBlocks`.
          now: When it arrived.

        Raises:
          RemoteProtocolError: The limit is exceeded.
        """
        if now - self._since >= 1.0:
            self._since, self._count = now, 0
        self._count += 1 + (num_bytes >> 16)
        allowed = _MAX_UNSOLICITED + _MAX_COPIES * num_pieces
        if self._count > allowed:
            raise RemoteProtocolError(
                f"expected at most {allowed} messages (or as many times 64 KiB) a "
                f"second that answer nothing; got more, the last one "
                f"{getattr(what, 'name', what)}; is that an envserve server?"
            )
