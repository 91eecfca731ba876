"""What is asked without a lease, by who looks on: STATUS and FRAME.

Who may see a lease: its own user; without keys, and as the user who runs the server,
everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from envserve.session.server.decisions import Decision, SessionId
from envserve.session.server.lease_table import Claims
from envserve.session.server.policy import Refusal
from envserve.session.server.quotas import Quotas
from envserve.session.server.replies import Answers
from envserve.wire.bodies import FrameRequest, FrameResult
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.message import Message

__all__ = ["QUESTIONS", "Questions"]

QUESTIONS: Final = frozenset({MessageType.STATUS, MessageType.FRAME})
#: How much of a second a FRAME costs its user, of which it has one in advance.
_SECONDS: Final = 1 / 32
_RECORD_SECONDS: Final = 1.0


class Questions:
    """Answers them, by `report` and `look`.

    `report` gives the body of a STATUS_RESULT, for a user, at an instant; `look` is
    `pool.looks` of a session.
    """

    report: Callable[[str, float], bytes]
    look: Callable[[SessionId, FrameRequest], tuple[FrameResult, bytes]]

    def __init__(self, claims: Claims, answers: Answers, quotas: Quotas) -> None:
        self._claims, self._answers, self._quotas = claims, answers, quotas
        self._due: dict[str, float] = {}

    def answer(self, message: Message, now: float) -> list[Decision]:
        """Answers a question, or not if its user asks too often: it will ask again.

        Raises:
          Refusal: The key is no longer good, or there is no such lease to be seen.
          RemoteProtocolError: The message is malformed.
        """
        user = message.peer[-1]
        self._quotas.of(user)  # whose key is good, still
        if message.type is MessageType.STATUS:
            body, kind = self.report(user, now), MessageType.STATUS_RESULT
            return [self._answers.reply(message, kind, body)]
        due = max(self._due.get(user, now), now)
        if due >= now + 1.0:
            return []
        request = FrameRequest.decode(message.body)
        self._due[user] = due + (_RECORD_SECONDS if request.record else _SECONDS)
        seen = self._claims.seen_by(user)
        claim = next((c for c in seen if c.number == request.lease), None)
        if claim is None:
            text = f"there is no lease {request.lease}, or it is another user's"
            raise Refusal(ErrorCode.LEASE_LOST, text)
        result, record = self.look(claim.session, request)
        body, kind = result.encode(), MessageType.FRAME_RESULT
        return [self._answers.reply(message, kind, body, payload=record)]
