"""A second user of a server, who knows all numbers of the first, and tries them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Final

from envserve.session.server.decisions import (
    Audit,
    Decision,
    EndPool,
    Reply,
    ReplyWelcome,
    StartPool,
)
from envserve.session.server.lease_table import LeaseRecord
from envserve.session.server.server_session import ServerSession
from envserve.wire.bodies import Attach
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, decode, encode
from tests.simulation.journal import Violation

#: The user of all clients and trainers.
OWNER: Final = "owner"
_THIEF: Final = "thief"
_PEER: Final = (0, 0, _THIEF)
#: Messages that arrive at a host between two that the thief makes use of.
_EVERY: Final = 8
#: Added to a session's number, it gives one that nobody has.
_UNKNOWN: Final = 1 << 63

_KINDS: Final = (
    MessageType.ATTACH,
    MessageType.DETACH,
    MessageType.PING,
    MessageType.RESET,
    MessageType.CALL,
)


class Hijacker:
    """Takes what the owner says to a host, and says it, or what could follow, itself.

    Draws from a source of its own: a simulation goes on as if there were none.
    """

    def __init__(self) -> None:
        self._source = random.Random(0)
        self._num_heard = 0

    def hear(
        self, session: ServerSession, frames: Sequence[Buffer], now: float
    ) -> None:
        """Tries its luck with a message of the owner, before that arrives.

        Raises:
          Violation: It had an effect, or another answer than with an unknown session.
        """
        self._num_heard += 1
        if self._num_heard % _EVERY:
            return
        message = self._make_up(decode(frames))
        before = _state_of(session)
        answers = [
            self._say(session, dataclasses.replace(message, session=number), now)
            for number in (message.session, message.session ^ _UNKNOWN)
        ]
        if answers[0] != answers[1]:
            raise Violation(f"a thief was told of a session: {answers}")
        if _state_of(session) != before:
            raise Violation(f"a thief has done something: {message}")

    def _make_up(self, message: Message) -> Message:
        """Returns the message itself, or one like it with what could follow."""
        source = self._source
        kind = source.random()
        if kind < 0.3:
            return message
        if kind < 0.6:
            return dataclasses.replace(message, attempt=message.attempt + 1)
        if kind < 0.8:
            entries = tuple((block, seq + 1) for block, seq in message.entries)
            request = message.request + 1
            return dataclasses.replace(message, request=request, entries=entries)
        type_ = source.choice(_KINDS)
        body = message.body
        if type_ is MessageType.ATTACH:
            body = Attach(env_name="envserve/Ledger-v0", num_envs=1, seed=0).encode()
        elif type_ in (MessageType.DETACH, MessageType.PING):
            body = b""
        return dataclasses.replace(message, type=type_, body=body, entries=())

    def _say(self, session: ServerSession, message: Message, now: float) -> list[Any]:
        """Returns what the server does, without the session's number."""
        number = (_THIEF, message.session)
        done = session.receive(_PEER, encode(message), now)
        if number in session.leases and message.type is MessageType.ATTACH:
            # It gets envs of its own, and gives them back.
            detach = dataclasses.replace(message, type=MessageType.DETACH, body=b"")
            done += session.receive(_PEER, encode(detach), now)
            done += session.pool_closed(number)
        for decision in done[:]:
            if isinstance(decision, ReplyWelcome):
                done.remove(decision)
                body = session.leases.welcome_for(_THIEF).encode()
                done += session.answer(decision.request, body)
        return [_shown(decision, message.session) for decision in done]


def _shown(decision: Decision, number: int) -> Any:
    if isinstance(decision, Reply) and decision.peer == _PEER:
        message = decode([bytes(frame) for frame in decision.frames])
        if message.session == number:
            return dataclasses.replace(message, session=0)
    elif isinstance(decision, StartPool) and decision.session == (_THIEF, number):
        return decision.settings
    elif isinstance(decision, EndPool) and decision.session == (_THIEF, number):
        return EndPool
    elif isinstance(decision, Audit) and decision.user == _THIEF:
        return decision
    raise Violation(f"a thief has caused {decision}")


def _state_of(session: ServerSession) -> list[Any]:
    """What may not change, whatever another user says."""
    leases = session.leases
    ended = dict(leases.ended_sessions[OWNER])
    return [ended, set(leases.unnotified), *map(_state_of_record, leases.values())]


def _state_of_record(record: LeaseRecord) -> tuple[Any, ...]:
    asked, lease = record.request, record.lease
    numbers = asked.type, asked.request, asked.attempt, asked.peer
    state = (record.session, record.state, record.last_message_at, numbers)
    if lease is None:
        return state
    requests = [r and (r.message.attempt, r.message.peer) for r in lease._requests]
    return (
        *state,
        lease.num_late_messages,
        [*lease._last_seq],
        [*lease._states],
        requests,
    )
