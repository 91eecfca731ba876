"""A second user, who tries to use the session numbers of the first user."""

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
from envserve.session.server.server_protocol import ServerProtocol
from envserve.wire.bodies import Attach
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, decode, encode
from tests.simulation.journal import Violation

#: The user of all clients and trainers.
OWNER: Final = "owner"
_USER: Final = "hijacker"
_PEER: Final = (0, 0, _USER)
#: Number of the owner's messages per attempt to abuse one.
_MESSAGES_PER_ATTEMPT: Final = 8
#: XOR mask that turns a session number into an unknown one.
_UNKNOWN: Final = 1 << 63

_KINDS: Final = (
    MessageType.ATTACH,
    MessageType.DETACH,
    MessageType.PING,
    MessageType.RESET,
    MessageType.CALL,
)


class Hijacker:
    """Copies or forges the owner's messages and sends them as another user.

    It has its own random generator, so that it does not change the simulation.
    """

    def __init__(self) -> None:
        self._source = random.Random(0)
        self._num_messages = 0

    def intercept(
        self, protocol: ServerProtocol, frames: Sequence[Buffer], now: float
    ) -> None:
        """Try to abuse one of the owner's messages before the server receives it.

        Raises:
          Violation: The attempt had an effect, or its reply differs from the reply to
            an unknown session.
        """
        self._num_messages += 1
        if self._num_messages % _MESSAGES_PER_ATTEMPT:
            return
        message = self._forge(decode(frames))
        before = _state_of(protocol)
        replies = [
            self._send(protocol, dataclasses.replace(message, session=number), now)
            for number in (message.session, message.session ^ _UNKNOWN)
        ]
        if replies[0] != replies[1]:
            raise Violation(f"replies reveal another user's session: {replies}")
        if _state_of(protocol) != before:
            raise Violation(f"another user's message changed a session: {message}")

    def _forge(self, message: Message) -> Message:
        """Return the message itself, or a forged message that could follow it."""
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

    def _send(
        self, protocol: ServerProtocol, message: Message, now: float
    ) -> list[Any]:
        """Send a message; return the server's decisions, without the session number."""
        number = (_USER, message.session)
        decisions = protocol.receive(_PEER, encode(message), now)
        if number in protocol.leases and message.type is MessageType.ATTACH:
            # The hijacker got new envs, which is allowed; release them.
            detach = dataclasses.replace(message, type=MessageType.DETACH, body=b"")
            decisions += protocol.receive(_PEER, encode(detach), now)
            decisions += protocol.pool_closed(number)
        for decision in decisions[:]:
            if isinstance(decision, ReplyWelcome):
                decisions.remove(decision)
                body = protocol.leases.welcome_for(_USER).encode()
                decisions += protocol.reply(decision.request, body)
        return [_anonymised(decision, message.session) for decision in decisions]


def _anonymised(decision: Decision, number: int) -> Any:
    if isinstance(decision, Reply) and decision.peer == _PEER:
        message = decode([bytes(frame) for frame in decision.frames])
        if message.session == number:
            return dataclasses.replace(message, session=0)
    elif isinstance(decision, StartPool) and decision.session == (_USER, number):
        return decision.settings
    elif isinstance(decision, EndPool) and decision.session == (_USER, number):
        return EndPool
    elif isinstance(decision, Audit) and decision.user == _USER:
        return decision
    raise Violation(f"another user's message caused {decision}")


def _state_of(protocol: ServerProtocol) -> list[Any]:
    """Return all state that other users' messages must not change."""
    leases = protocol.leases
    ended = dict(leases.ended_sessions[OWNER])
    return [ended, set(leases.unnotified), *map(_state_of_record, leases.values())]


def _state_of_record(record: LeaseRecord) -> tuple[Any, ...]:
    request, lease = record.request, record.lease
    ids = request.type, request.request, request.attempt, request.peer
    state = (record.session, record.state, record.last_message_at, ids)
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
