"""The server's half: greets, grants leases within its capacity, and ends them.

A client's ATTACH is a claim, see `ClaimState`: BUILDING until its envs are built,
GRANTED while its lease runs, CLOSING until its workers are gone; then only how it ended
is kept. Any message of a session renews its lease. Time is an argument; nothing waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from msgspec.structs import replace

from envserve.errors import EnvserveError, RemoteProtocolError
from envserve.keys.formats import INVITATION
from envserve.keys.grant import Grant
from envserve.lane import Block, Outcome
from envserve.session.server.decisions import Decision, Reply, SessionId
from envserve.session.server.lease_record import Claim
from envserve.session.server.lease_table import Claims, Offer
from envserve.session.server.observer_requests import QUESTIONS, Questions
from envserve.session.server.policy import Health, Refusal, TooEarly
from envserve.session.server.quotas import Quotas
from envserve.session.server.replies import (
    Answers,
    lease_lost,
    no_new_leases,
    versions_differ,
)
from envserve.session.states import ClaimState
from envserve.settings import HostSettings
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Drain, Pong
from envserve.wire.constants import (
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
    MessageType,
)
from envserve.wire.handshake import ErrorBody, Hello, error_body_of
from envserve.wire.message import Buffer, Message, Peer, decode, peek

__all__ = ["ServerSession"]

_LOGGER: Final = logging.getLogger(__name__)

#: Types from here on are sent by servers.
_FIRST_OF_SERVER: Final = 128
#: What runs on envs.
_OPERATIONS: Final = frozenset({MessageType.STEP, MessageType.RESET, MessageType.CALL})


class ServerSession:
    """All conversations of one server.

    Every method returns what the shell has to do, in that order.

    Attributes:
      boot: Number of this start of the server, by which clients notice a restart.
      claims: What clients have, or have asked for.
      quotas: What users may.
      dropped_messages: How many were no messages at all.
      questions: Answers who looks on.
      refusals: ERRORs that were sent, by the name of their code.
    """

    def __init__(
        self,
        policy: HostSettings,
        offer: Offer,
        boot: int,
        check_health: Callable[[], Health] = Health,
        enrol: Callable[[str, bytes], None] | None = None,
        grant_of: Callable[[str], Grant | None] | None = None,
        drain: Callable[[], float] | None = None,
    ) -> None:
        """Starts without sessions.

        Args:
          policy: Limits and permissions.
          offer: Env names.
          boot: Random number in [1, 2**64).
          check_health: Tells how the process that serves is.
          enrol: Puts a public key in the place of a user's, who was invited only, or
            raises RemoteProtocolError; None if there are no keys.
          grant_of: What the key of a user may, see `Quotas`.
          drain: Has a drain begin soon; returns how many seconds it may take.
        """
        self.boot = boot
        self.dropped_messages = 0
        self._answers = Answers(boot, shows_folders=policy.debug_errors)
        self.refusals = self._answers.refusals
        self.check_health = check_health
        self._enrol, self._drain = enrol, drain
        self.quotas = Quotas(policy, grant_of)
        self.claims = Claims(policy, offer, self._answers, self.quotas)
        self.questions = Questions(self.claims, self._answers, self.quotas)

    @property
    def has_ended(self) -> bool:
        """Whether, after `begin_drain` or `stop`, no client thinks it has envs."""
        return self.claims.have_ended

    # Messages.

    def receive(
        self, peer: Peer, frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        """Takes what a peer has sent, whatever it is.

        What others have under a number does not exist for it, and is answered so.
        """
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            asked = _peek(peer, frames)
            if asked is None:
                self.dropped_messages += 1
                return []
            return [self._answers.refuse(asked, ErrorCode.BAD_MESSAGE, str(error))]
        message.peer = peer
        try:
            # The usual case first, which needs no closer look.
            claim = self.claims.get((peer[-1], message.session))
            if (
                claim is not None
                and claim.lease is not None
                and message.type in _OPERATIONS
                and message.boot == self.boot
                and message.epoch == claim.lease.epoch
                and message.version == VERSION
            ):
                claim.heard_at = now
                claim.asked.peer = peer  # it may have connected anew
                return claim.lease.handle(message, now)
            return self._dispatch(message, claim, now)
        except Refusal as refusal:
            self.claims.tell_refusal(refusal, peer[-1], now)
            return [self._answers.error(message, refusal.body)]
        except RemoteProtocolError as error:
            return [self._answers.refuse(message, ErrorCode.BAD_MESSAGE, str(error))]

    def receive_failed(self, peer: Peer, frames: Sequence[Buffer]) -> list[Decision]:
        """Answers a message that met a defect of ours; ends its session, if any.

        How far it got cannot be known, so nothing of that session can be relied on.
        """
        message = _peek(peer, frames)
        if message is None:
            return []
        body = ErrorBody(
            code=ErrorCode.INTERNAL,
            executed=Executed.UNKNOWN,
            text="the server failed at this message; look at its log",
        )
        answer = self._answers.error(message, body)
        claim = self.claims.get((peer[-1], message.session))
        if claim is None or message.boot != self.boot:
            return [answer]
        return [answer, *self.claims.close(claim, body)]

    def _dispatch(
        self, message: Message, claim: Claim | None, now: float
    ) -> list[Decision]:
        """Handles all but the operations of a granted lease."""
        kind = message.type
        if kind is MessageType.JOIN or message.peer[-1].startswith(INVITATION):
            return self._answers.join(message, self._enrol)
        if kind is MessageType.HELLO:
            return self._on_hello(message)
        if _is_from_server(message):
            self.dropped_messages += 1  # an answer to it could go round in circles
            return []
        if message.version != VERSION:
            raise versions_differ(message.version)
        if kind in QUESTIONS:
            return self.questions.answer(message, now)
        if not isinstance(kind, MessageType):
            raise Refusal(ErrorCode.UNSUPPORTED, f"messages of type {kind} are unknown")
        if kind is MessageType.ASK_DRAIN:
            return self._answers.drain(message, self._drain)
        if message.boot != self.boot:
            return [self._answers.fence(message, "server was started")]
        if kind is MessageType.DETACH:
            self.claims.unaware.discard((message.peer[-1], message.session))
        if claim is None:
            return self._on_stranger(message, now)
        claim.heard_at = now
        if kind is MessageType.ATTACH:
            return self._on_repeated_attach(claim, message, now)
        if kind is MessageType.DETACH:
            claim.asked = message
            return self.claims.close(claim, None)
        if claim.state is ClaimState.CLOSING:
            return [self._answers.session_ended(message, claim.reason)]
        if claim.lease is None:
            if kind is not MessageType.PING:
                raise Refusal(ErrorCode.BAD_MESSAGE, "the lease is not granted yet")
            pong = Pong(running={})
        elif message.epoch != claim.lease.epoch:
            return [self._answers.fence(message, "lease was granted")]
        else:
            claim.asked.peer = message.peer
            pong = claim.lease.pong(now)
        return [self._answers.reply(message, MessageType.PONG, pong.encode())]

    def _on_hello(self, message: Message) -> list[Decision]:
        hello = Hello.decode(message.body)
        if hello.min_version > VERSION or hello.max_version < MIN_VERSION:
            raise versions_differ(f"{hello.min_version} to {hello.max_version}")
        if message.session:
            session = message.peer[-1], message.session
            self.claims.note_name(session, hello.client)
        body = self.claims.welcome(message.peer[-1], self.check_health()).encode()
        return [self._answers.reply(message, MessageType.WELCOME, body)]

    def _on_stranger(self, message: Message, now: float) -> list[Decision]:
        """Handles a session that has no envs: it wants some, or had some."""
        ended = self.claims.ended[message.peer[-1]]
        if message.session in ended:
            return [self._answers.session_ended(message, ended[message.session])]
        if message.type is MessageType.DETACH:
            return [self._answers.session_ended(message, None)]
        if message.type is not MessageType.ATTACH:
            text = "this session has no envs here; attach anew"
            return [self._answers.refuse(message, ErrorCode.LEASE_LOST, text)]
        if message.session == 0:
            raise RemoteProtocolError("expected a session number that is not 0")
        if self.claims.is_ending:
            raise no_new_leases()
        try:
            self.claims.add(message, now)
        except TooEarly as refusal:  # a later copy will not be
            self.claims.tell_refusal(refusal, message.peer[-1], now)
            return [self._answers.building(message)]
        return [*self.claims.start_builds(), self._answers.building(message)]

    def _on_repeated_attach(
        self, claim: Claim, message: Message, now: float
    ) -> list[Decision]:
        if message.body != claim.attach_body:
            raise RemoteProtocolError("this session has attached with other arguments")
        if claim.state is ClaimState.CLOSING:
            return [self._answers.session_ended(message, claim.reason)]
        claim.asked = message
        if claim.state is ClaimState.GRANTED and claim.repeats.allow(now):
            return [self._tell_granted(claim)._replace(repeats=claim.repeats)]
        return [self._answers.building(message, now - claim.since)]

    def _tell_granted(self, claim: Claim) -> Reply:
        asked = _unasked(claim, claim.asked.request)
        asked.attempt = claim.asked.attempt
        return self._answers.reply(asked, MessageType.GRANTED, claim.granted)

    # What has happened to pools.

    def pool_ready(
        self,
        session_id: SessionId,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        now: float,
    ) -> list[Decision]:
        """Grants the lease, since the envs are built."""
        claim = self.claims[session_id]
        if claim.state is not ClaimState.BUILDING:
            return []
        try:
            self.claims.grant(claim, spec, blocks, rows)
        except Refusal as refusal:
            return self.claims.close(claim, refusal.body)
        waited, extra = now - claim.since, {"fields": claim.fields}
        text = "%s, granted to %s after %.1f s"
        _LOGGER.info(text, claim, claim.client, waited, extra=extra)
        return [self._tell_granted(claim), *self.claims.start_builds()]

    def pool_failed(
        self, session_id: SessionId, error: EnvserveError
    ) -> list[Decision]:
        """Ends a session whose envs could not be built, or are lost for good."""
        claim = self.claims[session_id]
        body = error_body_of(error, Executed.UNKNOWN)
        if claim.lease is None and body.code is ErrorCode.INTERNAL:
            # No memory, no descriptors: whatever it was, there are no envs.
            body = replace(body, code=ErrorCode.ENV_START_FAILED)
        return self.claims.close(claim, body)

    def pool_finished(
        self,
        session_id: SessionId,
        outcomes: Sequence[Outcome],
        absent: Collection[int] = (),
    ) -> list[Decision]:
        """Answers what has ended in a session's pool; see `Lease.finish`."""
        claim = self.claims[session_id]
        if claim.lease is None:  # it is being closed
            return []
        replies = claim.lease.finish(outcomes, absent)
        if self.claims.is_ending and claim.lease.has_drained:
            text = "the server was drained: each of its envs ended an episode"
            replies += self.claims.close(claim, lease_lost(text))
        return replies

    def pool_broken(
        self, session_id: SessionId, error: EnvserveError
    ) -> list[Decision]:
        """Frees the envs of a session whose pool failed, and is gone already."""
        claim = self.claims.get(session_id)
        if claim is None:
            return []
        self.claims.close(claim, error_body_of(error, Executed.UNKNOWN))
        return self.pool_closed(session_id)

    def pool_closed(self, session_id: SessionId) -> list[Decision]:
        """Frees the envs of a session whose workers are gone; tells the client."""
        claim = self.claims.remove(session_id)
        ended = self._answers.session_ended(claim.asked, claim.reason)
        return [ended, *self.claims.start_builds()]

    # Leases, and the end of the server.

    def poll(self, now: float) -> list[Decision]:
        """Gives up the envs of clients that have been silent for too long."""
        return self.claims.close_silent(now)

    def next_deadline(self) -> float:
        """When `poll` has to be called next."""
        return self.claims.next_deadline()

    def begin_drain(self, grace_seconds: float) -> list[Decision]:
        """Grants nothing any more; a lease ends when its running episodes have.

        Args:
          grace_seconds: How long until `stop` will end those that are left.
        """
        self.claims.is_ending = True
        body = Drain(grace_ms=int(1000 * grace_seconds)).encode()
        decisions: list[Decision] = []
        for claim in self.claims.values():
            if claim.state is ClaimState.BUILDING:
                decisions += self.claims.close(claim, no_new_leases().body)
            elif claim.lease is not None:
                claim.lease.begin_drain()
                asked = _unasked(claim, 0)
                decisions.append(self._answers.reply(asked, MessageType.DRAIN, body))
        if count := len(self.claims):
            _LOGGER.info("draining: %g s for leases: %d", grace_seconds, count)
        return decisions

    def stop(self, why: str = "") -> list[Decision]:
        """Ends all sessions, since the server is about to stop.

        Their clients are told what has ended a drain.
        """
        text = f"the server was drained: {why}" if why else "the server was stopped"
        return self.claims.close_all(lease_lost(text))


def _unasked(claim: Claim, request: int) -> Message:
    """Returns what to answer, to say what a claim's latest message did not ask."""
    return Message(
        MessageType.ATTACH,
        session=claim.session[1],
        epoch=0 if claim.lease is None else claim.lease.epoch,
        request=request,
        peer=claim.asked.peer,
    )


def _peek(peer: Peer, frames: Sequence[Buffer]) -> Message | None:
    """Returns the numbers of what is no message, if it may be answered at all."""
    message = peek(frames)
    if message is None or _is_from_server(message):
        return None
    message.peer = peer
    return message


def _is_from_server(message: Message) -> bool:
    return message.type >= _FIRST_OF_SERVER  # also what we do not know
