"""Decisions of a `ServerProtocol`, which the server's event loop carries out.

`ServerProtocol` does no I/O and calls no other part of the server. Instead, its methods
return lists of decisions, in the order in which they must be carried out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from envserve.lane import Call, Reset
from envserve.settings import PoolSettings
from envserve.wire.bodies import FrameRequest
from envserve.wire.message import Buffer, Message, Peer

#: A user and a session number, which the client draws at random. Because the user is
#: part of the id, a client cannot access the session of another user, even with its
#: session number.
SessionId = tuple[str, int]
#: Minimum seconds between two copies of a reply. The longer interval applies after
#: `_MAX_FREQUENT_COPIES` copies.
_FREQUENT_SECONDS: Final = 1.0
_RARE_SECONDS: Final = 60.0
_MAX_FREQUENT_COPIES: Final = 8


@dataclass(slots=True)
class ResendLimiter:
    """Limits the rate at which a reply is resent.

    A client that reads its replies resends requests only if a message was lost, which
    is rare. Replies to a client that does not read them would fill the memory.

    Attributes:
      num_copies: Number of times that the reply was sent again.
      sent_at: Time of the latest copy, in monotonic seconds.
    """

    num_copies: int = 0
    sent_at: float = -math.inf

    def allow(self, now: float) -> bool:
        """Return whether to send a copy now; if so, count the copy.

        At first, one copy per second is allowed, and later one per minute. The number
        of copies is unlimited, because a client whose replies were all lost must not
        wait forever.
        """
        is_rare = self.num_copies >= _MAX_FREQUENT_COPIES
        interval = _RARE_SECONDS if is_rare else _FREQUENT_SECONDS
        if now < self.sent_at + interval:
            return False
        self.num_copies += 1
        self.sent_at = now
        return True


class Reply(NamedTuple):
    """Send a message to a peer, or drop it if it cannot be sent now.

    A client resends its request until it receives the reply.

    Attributes:
      peer: Routing id and user of the receiver.
      frames: Frames of the message.
      limiter: Limiter that has counted this copy of the reply; None for the original.
    """

    peer: Peer
    frames: list[Buffer]
    limiter: ResendLimiter | None = None


class Audit(NamedTuple):
    """Write a user's event to the audit log, if there is one.

    Attributes:
      event: Kind of event, such as "attached" or "refused".
      user: Name of the user; "" if unknown.
      env_name: Name of the envs concerned; "" if none.
      num_envs: Number of the envs concerned.
      reason: Reason for the event.
      fingerprint: Fingerprint of the key; "" for the current key of `user`.
      address: Address of the client; "" for the current address of `user`.
    """

    event: str
    user: str = ""
    env_name: str = ""
    num_envs: int = 0
    reason: str = ""
    fingerprint: str = ""
    address: str = ""


class BeginDrain(NamedTuple):
    """Begin to drain the server, as SIGTERM does."""


# Requests whose replies the event loop has to compute. The event loop passes a reply
# to `ServerProtocol.reply`, and a Rejection or RemoteProtocolError to
# `ServerProtocol.reject`.


class ReplyWelcome(NamedTuple):
    """Reply to a HELLO with the `Welcome` for its user."""

    request: Message


class ReplyStatus(NamedTuple):
    """Reply to a STATUS with the `ServerStatus` that its user may see."""

    request: Message


class ReplyFrame(NamedTuple):
    """Reply to a FRAME with frames or a flight record from a session's pool."""

    request: Message
    session: SessionId
    frame_request: FrameRequest


class EnrolKey(NamedTuple):
    """Replace an invitation with a public key in a thread; then reply to the JOIN."""

    request: Message
    public_key: bytes


# Pools.


class StartPool(NamedTuple):
    """Start the pool of a session; then call `pool_ready` or `pool_failed`."""

    session: SessionId
    settings: PoolSettings


class RunStep(NamedTuple):
    """Step blocks of a session's pool; then call `pool_finished`."""

    session: SessionId
    blocks: Sequence[int]


class RunReset(NamedTuple):
    """Reset blocks of a session's pool; then call `pool_finished`."""

    session: SessionId
    resets: Sequence[Reset]


class RunCall(NamedTuple):
    """Access attributes of envs of a session's pool; then call `pool_finished`."""

    session: SessionId
    calls: Sequence[Call]


class EndPool(NamedTuple):
    """Close the pool of a session; then call `pool_closed`."""

    session: SessionId


RequestDecision = ReplyWelcome | ReplyStatus | ReplyFrame | EnrolKey
PoolDecision = RunStep | RunReset | RunCall | StartPool | EndPool
Decision = Reply | Audit | BeginDrain | RequestDecision | PoolDecision
