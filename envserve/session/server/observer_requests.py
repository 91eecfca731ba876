"""Requests that need no lease: STATUS and FRAME.

A user with a key can only observe their own leases. Users without a key, including the
operator of the server, can observe all leases.
"""

from __future__ import annotations

from typing import Final

from envserve.session.server.decisions import Decision, ReplyFrame, ReplyStatus
from envserve.session.server.lease_table import LeaseTable
from envserve.session.server.permissions import Rejection
from envserve.session.server.quotas import Quotas
from envserve.wire.bodies import FrameRequest
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.message import Message

#: Types of requests that need no lease.
OBSERVER_TYPES: Final = frozenset({MessageType.STATUS, MessageType.FRAME})
#: Seconds that a FRAME request adds to its user's leaky bucket, which holds one second.
#: A user can therefore request 32 rendered frames or one flight record per second.
_FRAME_SECONDS: Final = 1 / 32
_RECORD_SECONDS: Final = 1.0


class ObserverRequests:
    """Checks STATUS and FRAME requests, and limits the rate of FRAME requests."""

    def __init__(self, leases: LeaseTable, quotas: Quotas) -> None:
        self._leases, self._quotas = leases, quotas
        self._next_due: dict[str, float] = {}

    def handle(self, request: Message, now: float) -> list[Decision]:
        """Return the decision that replies to a request, if the rate limit allows it.

        Otherwise, return an empty list. The client then resends its request.

        Raises:
          Rejection: The key is no longer valid, or the lease is not visible to the
            user.
          RemoteProtocolError: The message is malformed.
        """
        user = request.peer[-1]
        self._quotas.of(user)  # raises unless the key is still valid
        if request.type is MessageType.STATUS:
            return [ReplyStatus(request)]
        due_at = max(self._next_due.get(user, now), now)
        if due_at >= now + 1.0:
            return []
        frame_request = FrameRequest.decode(request.body)
        self._next_due[user] = due_at + (
            _RECORD_SECONDS if frame_request.record else _FRAME_SECONDS
        )
        for record in self._leases.visible_to(user):
            if record.number == frame_request.lease:
                return [ReplyFrame(request, record.session, frame_request)]
        text = f"lease {frame_request.lease} does not exist, or belongs to another user"
        raise Rejection(ErrorCode.LEASE_LOST, text)
