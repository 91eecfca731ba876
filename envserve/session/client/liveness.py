"""Measures the silence of a client's server; defines timeouts and lost leases.

Silence is measured from the first unanswered message. Time during which the client
itself was suspended does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from envserve.errors import EnvserveError, RemoteProtocolError, ServerLost
from envserve.wire.message import Buffer

#: Seconds without a message from the server until the client sends a PING.
PING_SECONDS: Final = 1.0
#: Seconds of silence after a request until a server counts as unreachable.
_UNREACHABLE_SECONDS: Final = 3.5
#: Seconds without a connection until a server counts as unreachable.
_DISCONNECTED_SECONDS: Final = 1.0
#: If more seconds than this pass between two calls to `advance`, the client process was
#: suspended, because it normally calls `advance` more often.
_SUSPENDED_SECONDS: Final = 5.0
#: Maximum number of unsolicited messages per second, plus `_MAX_COPIES` for each piece
#: of the longest reply (`ClientBlocks.num_pieces`): a server that was suspended for a
#: minute then replies to all copies of a request, and only the first reply is expected.
_MAX_UNSOLICITED: Final = 1000
_MAX_COPIES: Final = 32


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time and memory limits of a client."""

    connect_seconds: float = 10.0
    """Maximum silence of the server until it grants the first lease, in seconds."""
    lost_seconds: float = 60.0
    """Maximum silence of the server, and maximum time without a lease, in seconds,
    after the first lease was granted. The server may ignore a request for the same
    time, or for 8 s if that is longer."""
    operation_seconds: float = 3600.0
    """Maximum duration, in seconds, of an operation that the server reports as running,
    and of building envs that replace lost ones."""
    pads_lost_rows: bool = False
    """Whether the client continues to request a lease after `lost_seconds`, while its
    caller gets padding. If false, the session ends."""
    max_row_mib: int = 1024
    """Memory limit of the rows in MiB; needed because the server chooses their size."""


@dataclass(slots=True)
class LostLease:
    """A lost lease that is being replaced. Times are monotonic seconds.

    Attributes:
      error: Reason for the loss.
      lost_at: Time of the loss.
      boot: Boot id of the server that held the lease; 0 if there was none.
      give_up_error: Reason why callers should stop waiting; None before that.
      retry_at: Time of the next attempt; infinity if a request is in flight.
      busy_until: Time at which to stop retrying if other clients have the envs.
      detach_frames: DETACH that frees the lost lease; empty if the server does not
        hold it.
      stalled_address: Address of the server if it replied to PINGs, but not to
        requests; otherwise "". A new lease from this server does not clear
        `give_up_error`; only a reply does.
      rejection: Text of the latest rejection of a new lease; "" if there is none.
    """

    error: EnvserveError
    lost_at: float
    boot: int = 0
    give_up_error: ServerLost | None = None
    retry_at: float = math.inf
    busy_until: float = math.inf
    detach_frames: list[Buffer] = field(default_factory=list)
    stalled_address: str = ""
    rejection: str = ""


class Liveness:
    """Measures how long the server has been silent. Times are monotonic seconds.

    Attributes:
      silent_since: Time of the first unanswered message; infinity if there is none.
      disconnected_since: Time of the disconnection; infinity while connected.
      ping_at: Time of the next PING.
      is_unreachable: Whether callers should not wait for the server, because it was
        silent or disconnected for too long. The server's next message clears it.
      silent_seconds: Total duration of all silences longer than a second.
    """

    def __init__(self, now: float) -> None:
        self.silent_since, self.disconnected_since = now, math.inf
        self.ping_at = math.inf
        self.is_unreachable = False
        self.silent_seconds = 0.0
        self._last_checked_at = now

    def record_message(self, now: float) -> None:
        """Record that the server has sent a message."""
        if now - self.silent_since > PING_SECONDS:
            self.silent_seconds += now - self.silent_since
        self.silent_since = math.inf
        self.ping_at = now + PING_SECONDS
        self.is_unreachable = False

    def expect_reply(self, now: float) -> None:
        """Record that a message that requires a reply was sent."""
        self.silent_since = min(self.silent_since, now)

    def record_disconnect(self, now: float) -> None:
        """Record that the connection is broken."""
        self.disconnected_since = min(self.disconnected_since, now)

    def record_connect(self) -> None:
        """Record that the connection is established."""
        self.disconnected_since = math.inf

    def describe(self, now: float) -> str:
        """Describe the lost connection or silence, with its duration; "" if none."""
        if self.disconnected_since < math.inf:
            return f"no connection for {now - self.disconnected_since:.0f} s"
        silent_seconds = now - self.silent_since
        return f"no reply for {silent_seconds:.0f} s" if silent_seconds > 1 else ""

    def detect_suspension(self, now: float) -> float:
        """Return for how many seconds this client was suspended; 0 if it was not.

        After a suspension, silence and disconnection are measured from `now`.
        """
        seconds, self._last_checked_at = now - self._last_checked_at, now
        if seconds <= _SUSPENDED_SECONDS:
            return 0.0
        if self.silent_since < math.inf:
            self.silent_since = now
        if self.disconnected_since < math.inf:
            self.disconnected_since = now
        return seconds

    @property
    def unreachable_at(self) -> float:
        """Time at which the server becomes unreachable; infinity if it already is."""
        if self.is_unreachable:
            return math.inf
        disconnected_at = self.disconnected_since + _DISCONNECTED_SECONDS
        return min(self.silent_since + _UNREACHABLE_SECONDS, disconnected_at)


class UnsolicitedLimit:
    """Limits the number of messages per second that match no request in flight.

    These messages are mostly late replies. PONGs and notices (BUILDING, ABSENT, DRAIN)
    are counted too. An envserve server sends few of them.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._count = 0

    def count(
        self, message_type: int | str, num_bytes: int, num_pieces: int, now: float
    ) -> None:
        """Count a message once, and once more for each 64 KiB of its length.

        Args:
          message_type: Type of the message; a description if the message is malformed.
          num_bytes: Length of the message.
          num_pieces: Number of pieces of the longest reply; see `ClientBlocks`.
          now: Time of arrival.

        Raises:
          RemoteProtocolError: The limit is exceeded.
        """
        if now - self._since >= 1.0:
            self._since, self._count = now, 0
        self._count += 1 + (num_bytes >> 16)
        allowed = _MAX_UNSOLICITED + _MAX_COPIES * num_pieces
        if self._count > allowed:
            raise RemoteProtocolError(
                f"too many unsolicited messages: expected at most {allowed} per second "
                f"(a long message counts once per 64 KiB); got more, the last one of "
                f"type {getattr(message_type, 'name', message_type)}; check that this "
                f"address is an envserve server"
            )
