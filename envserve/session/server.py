"""The server's half: greets, grants leases within its capacity, and ends them.

A session is BUILDING from its ATTACH until its envs are built, GRANTED while its
operations run, CLOSING until its envs are gone, then ENDED: only how it ended is kept.
Any message of a session renews its lease. Time is an argument; nothing here waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from envserve import codec
from envserve.errors import (
    EnvserveError,
    LocalProtocolError,
    RemoteProtocolError,
)
from envserve.lane import Block, Outcome
from envserve.session.admission import (
    Claim,
    ClaimState,
    Offer,
    Recent,
    check_claim,
    pool_config,
    printable_name,
)
from envserve.session.answers import Answers, refused, versions
from envserve.session.decisions import Decision, EndPool, Reply, StartPool
from envserve.session.endings import drained, lease_lost, refusal_while_ending
from envserve.session.lease import Lease
from envserve.session.policy import Policy, Refusal
from envserve.session.translation import body_of
from envserve.session.vitals import Vitals
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Attach,
    Buffer,
    Building,
    Drain,
    ErrorBody,
    ErrorCode,
    Executed,
    Granted,
    Hello,
    Message,
    MessageType,
    Pong,
    Welcome,
    decode,
    peek,
)
from envserve.wire.constants import MAX_RESULT_BYTES

__all__ = ["ServerSession"]

_LOGGER: Final = logging.getLogger(__name__)


class ServerSession:
    """All conversations of one server.

    Every method returns what the shell has to do, in that order.

    Attributes:
      boot: Number of this start of the server, by which clients notice a restart.
      dropped_messages: How many were no messages at all.
    """

    def __init__(
        self,
        policy: Policy,
        offer: Offer,
        boot: int,
        look: Callable[[], Vitals] = Vitals,
    ) -> None:
        """Starts without sessions.

        Args:
          policy: Limits and permissions.
          offer: Env names.
          boot: Random number in [1, 2**64).
          look: Tells how the process that serves is.
        """
        self.boot = boot
        self.dropped_messages = 0
        self._answers = Answers(boot)
        self._policy = policy
        self._offer = offer
        self._look = look
        self._epoch = 0
        self._claims: dict[int, Claim] = {}
        #: How sessions ended, so that a late ATTACH does not revive them.
        self._ended: Recent[ErrorBody | None] = Recent()
        self._client_names: Recent[str] = Recent()
        self._is_ending = False  # draining, or stopping
        self._unaware: set[int] = set()  # whose leases have ended meanwhile

    @property
    def free_envs(self) -> int:
        """How many envs can be leased now."""
        leased = sum(claim.attach.num_hosted for claim in self._claims.values())
        return self._policy.total_envs - leased

    @property
    def has_farewelled(self) -> bool:
        """Whether, after `begin_drain` or `stop`, no client thinks it has envs."""
        return self._is_ending and not self._claims and not self._unaware

    def receive(
        self, route: bytes, frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        """Takes what a peer has sent, whatever it is."""
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            return self._on_undecodable(route, frames, error)
        try:
            return self._dispatch(message, route, now)
        except Refusal as refusal:
            _LOGGER.info("refused: %s", refusal)
            return [self._answers.error(route, message, refusal.body)]
        except RemoteProtocolError as error:
            return [self._answers.bad_message(route, message, error)]

    def receive_failed(self, route: bytes, frames: Sequence[Buffer]) -> list[Decision]:
        """Answers a message that met a defect of ours; ends its session, if any.

        How far it got cannot be known, so nothing of that session can be relied on.
        """
        message = peek(frames)
        if message is None or _is_from_server(message):
            return []
        body = ErrorBody(
            code=ErrorCode.INTERNAL,
            executed=Executed.UNKNOWN,
            text="the server failed at this message; look at its log",
        )
        answer = self._answers.error(route, message, body)
        claim = self._claims.get(message.session)
        if claim is None or message.boot != self.boot:
            return [answer]
        return [answer, *self._end(claim, body)]

    def pool_ready(
        self,
        session_id: int,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        now: float,
    ) -> list[Decision]:
        """Grants the lease, since the envs are built."""
        claim = self._claims[session_id]
        if claim.state is not ClaimState.BUILDING:
            return []
        self._epoch += 1
        granted = Granted(
            epoch=self._epoch,
            lease_seconds=self._policy.lease_seconds,
            spec=spec,
            blocks=tuple(blocks),
            spare_envs=claim.attach.spare_envs,
            is_wrapped=bool(claim.attach.wrappers),
        )
        try:
            claim.granted = granted.encode()
        except codec.CodecError as error:
            return self._end(
                claim, ErrorBody(code=ErrorCode.ENV_START_FAILED, text=str(error))
            )
        claim.lease = Lease(
            session=session_id,
            boot=self.boot,
            epoch=self._epoch,
            spec=spec,
            blocks=blocks,
            rows=rows,
            policy=self._policy,
        )
        if claim.lease.max_result_bytes > MAX_RESULT_BYTES:
            text = (
                f"results of {len(rows.reward)} envs need up to "
                f"{claim.lease.max_result_bytes} bytes, and clients accept "
                f"{MAX_RESULT_BYTES} at once; ask for fewer envs per server"
            )
            return self._end(
                claim, ErrorBody(code=ErrorCode.ENV_START_FAILED, text=text)
            )
        claim.state = ClaimState.GRANTED
        _LOGGER.info("%s, granted after %.1f s", claim, now - claim.since)
        return [self._grant(claim)]

    def pool_failed(self, session_id: int, error: EnvserveError) -> list[Decision]:
        """Ends a session whose envs could not be built, or are lost for good."""
        claim = self._claims[session_id]
        body = body_of(error, Executed.UNKNOWN)
        if claim.lease is None and body.code is ErrorCode.INTERNAL:
            # No memory, no descriptors: whatever it was, there are no envs.
            body = replace(body, code=ErrorCode.ENV_START_FAILED)
        return self._end(claim, body)

    def pool_finished(
        self, session_id: int, finished: Iterable[Outcome]
    ) -> list[Decision]:
        """Answers the requests that are complete with this."""
        claim = self._claims[session_id]
        if claim.lease is None or claim.state is not ClaimState.GRANTED:
            return []
        replies = claim.lease.finish(finished)
        if claim.lease.has_drained:
            replies += self._end(claim, drained("each of its envs ended an episode"))
        return replies

    def pool_broken(self, session_id: int, error: EnvserveError) -> list[Decision]:
        """Frees the envs of a session whose pool failed, and is gone already."""
        claim = self._claims.get(session_id)
        if claim is None:
            return []
        self._end(claim, body_of(error, Executed.UNKNOWN))
        return self.pool_closed(session_id)

    def pool_closed(self, session_id: int) -> list[Decision]:
        """Frees the envs of a session whose workers are gone; tells the client."""
        claim = self._claims.pop(session_id)
        self._ended.note(session_id, claim.ending)
        _LOGGER.info(
            "%s, ended (%s)",
            claim,
            claim.ending.text.partition("\n")[0] if claim.ending else "detached",
        )
        asked = Message(
            type=MessageType.ATTACH, session=session_id, request=claim.request
        )
        return [self._answers.farewell(claim.route, asked, claim.ending)]

    def poll(self, now: float) -> list[Decision]:
        """Gives up the envs of clients that have been silent for too long."""
        decisions: list[Decision] = []
        for claim in list(self._claims.values()):
            silence = now - claim.heard_at
            if now >= claim.heard_at + self._policy.lease_seconds and (
                claim.state is not ClaimState.CLOSING
            ):
                text = f"its client was silent for {silence:.1f} s"
                decisions += self._end(claim, lease_lost(text))
                self._unaware.discard(claim.session)  # nobody is there to know
        return decisions

    def begin_drain(self, grace_seconds: float) -> list[Decision]:
        """Grants nothing any more; a lease ends when its running episodes have.

        Args:
          grace_seconds: How long until `stop` will end those that are left.
        """
        self._is_ending = True
        decisions: list[Decision] = []
        for claim in list(self._claims.values()):
            if claim.state is ClaimState.BUILDING:
                decisions += self._end(claim, refusal_while_ending().body)
            elif claim.lease is not None:
                claim.lease.begin_drain()
                decisions.append(self._drain(claim, claim.lease, grace_seconds))
        _LOGGER.info(
            "draining: %d sessions have up to %g s to end their episodes",
            len(self._claims),
            grace_seconds,
        )
        return decisions

    def stop(self, why: str = "") -> list[Decision]:
        """Ends all sessions, since the server is about to stop.

        Args:
          why: For their clients, what has ended a drain.
        """
        body = drained(why) if why else lease_lost("the server was stopped")
        self._is_ending = True
        for claim in self._claims.values():
            if claim.ending is not None:
                self._unaware.add(claim.session)
        claims = list(self._claims.values())
        return [item for claim in claims for item in self._end(claim, body)]

    def next_deadline(self) -> float:
        """When `poll` has to be called next."""
        heard = [
            claim.heard_at
            for claim in self._claims.values()
            if claim.state is not ClaimState.CLOSING
        ]
        return min(heard, default=math.inf) + self._policy.lease_seconds

    # Messages.

    def _on_undecodable(
        self, route: bytes, frames: Sequence[Buffer], error: RemoteProtocolError
    ) -> list[Decision]:
        message = peek(frames)
        if message is None or _is_from_server(message):
            self.dropped_messages += 1
            return []
        return [self._answers.bad_message(route, message, error)]

    def _dispatch(self, message: Message, route: bytes, now: float) -> list[Decision]:
        kind = message.type
        if kind is MessageType.HELLO:
            return self._on_hello(message, route)
        if _is_from_server(message):
            self.dropped_messages += 1  # an answer to it could go round in circles
            return []
        if message.version != VERSION:
            raise Refusal(ErrorCode.VERSION_MISMATCH, versions(message.version))
        if not isinstance(kind, MessageType):
            raise Refusal(ErrorCode.UNSUPPORTED, f"messages of type {kind} are unknown")
        if message.boot != self.boot:
            return [self._answers.fenced(route, message, "server was started")]
        claim = self._claims.get(message.session)
        if kind is MessageType.DETACH:
            self._unaware.discard(message.session)
        if claim is None:
            return self._on_stranger(message, route, now)
        claim.heard_at = now
        if kind is MessageType.ATTACH:
            return self._on_repeated_attach(claim, message, route, now)
        if kind is MessageType.DETACH:
            claim.route, claim.request = route, message.request
            return self._end(claim, None)
        if claim.state is ClaimState.CLOSING:
            return [self._answers.farewell(route, message, claim.ending)]
        if claim.lease is None:
            if kind is not MessageType.PING:
                raise Refusal(ErrorCode.BAD_MESSAGE, "the lease is not granted yet")
            return [
                self._answers.reply(route, message, MessageType.PONG, Pong(running={}))
            ]
        if message.epoch != claim.lease.epoch:
            return [self._answers.fenced(route, message, "lease was granted")]
        claim.route = route  # it may have connected anew
        if kind is MessageType.PING:
            pong = claim.lease.pong(now)
            return [self._answers.reply(route, message, MessageType.PONG, pong)]
        return claim.lease.handle(message, route, now)

    def _on_hello(self, message: Message, route: bytes) -> list[Decision]:
        hello = Hello.decode(message.body)
        if hello.min_version > VERSION or hello.max_version < MIN_VERSION:
            theirs = f"{hello.min_version} to {hello.max_version}"
            raise Refusal(ErrorCode.VERSION_MISMATCH, versions(theirs))
        if message.session:
            self._client_names.note(message.session, printable_name(hello.client))
        vitals = self._look()
        welcome = Welcome(
            max_message_bytes=self._policy.max_message_bytes,
            lease_seconds=self._policy.lease_seconds,
            env_names=self._offer.names,
            num_names=len(self._offer.names),
            total_envs=self._policy.total_envs,
            free_envs=self.free_envs,
            is_starting=vitals.is_starting,
            is_draining=self._is_ending,
            loop_lag_ms=int(1000 * vitals.loop_lag_seconds),
        )
        return [self._answers.reply(route, message, MessageType.WELCOME, welcome)]

    def _on_stranger(
        self, message: Message, route: bytes, now: float
    ) -> list[Decision]:
        """Handles a session that has no envs: it wants some, or had some."""
        if message.session in self._ended:
            ending = self._ended[message.session]
            return [self._answers.farewell(route, message, ending)]
        if message.type is MessageType.DETACH:
            return [self._answers.farewell(route, message, None)]
        if message.type is not MessageType.ATTACH:
            text = "this session has no envs here; attach anew"
            return [self._answers.error(route, message, refused(message, text))]
        if message.session == 0:
            raise RemoteProtocolError("expected a session number that is not 0")
        if self._is_ending:
            raise refusal_while_ending()
        return self._on_attach(message, route, now)

    def _on_attach(self, message: Message, route: bytes, now: float) -> list[Decision]:
        attach = Attach.decode(message.body)
        claims = self._claims.values()
        check_claim(attach, self._offer, self._policy, claims, now)
        claim = Claim(
            message.session,
            attach,
            message.body,
            route,
            message.request,
            self._client_names.pop(message.session, "unnamed"),
            now,
            now,
        )
        self._claims[message.session] = claim
        _LOGGER.info("%s, attaching (client: %s)", claim, claim.client)
        building = self._answers.reply(
            route, message, MessageType.BUILDING, Building(elapsed_ms=0)
        )
        return [StartPool(claim.session, pool_config(attach, self._policy)), building]

    def _on_repeated_attach(
        self, claim: Claim, message: Message, route: bytes, now: float
    ) -> list[Decision]:
        if message.body != claim.attach_body:
            raise RemoteProtocolError("this session has attached with other arguments")
        if claim.state is ClaimState.CLOSING:
            return [self._answers.farewell(route, message, claim.ending)]
        claim.route, claim.request = route, message.request
        if claim.state is ClaimState.GRANTED:
            return [self._grant(claim)]
        building = Building(elapsed_ms=int(1000 * (now - claim.since)))
        return [self._answers.reply(route, message, MessageType.BUILDING, building)]

    def _end(self, claim: Claim, ending: ErrorBody | None) -> list[Decision]:
        """Begins to close; the client is told when the envs are gone."""
        if claim.state is ClaimState.CLOSING:
            return []
        claim.state = ClaimState.CLOSING
        claim.ending = ending
        if self._is_ending and ending is not None:
            self._unaware.add(claim.session)
        if claim.lease is not None:
            late = claim.lease.late_messages
            _LOGGER.info("%s, ending; %d late copies were ignored", claim, late)
        claim.lease = None
        return [EndPool(claim.session)]

    def _drain(self, claim: Claim, lease: Lease, grace_seconds: float) -> Reply:
        addressee = Message(
            type=MessageType.PING, session=claim.session, epoch=lease.epoch
        )
        body = Drain(grace_ms=int(1000 * grace_seconds))
        return self._answers.reply(claim.route, addressee, MessageType.DRAIN, body)

    def _grant(self, claim: Claim) -> Reply:
        if claim.lease is None:
            raise LocalProtocolError(f"{claim} has no lease to grant")
        return self._answers.granted(
            claim.route, claim.session, claim.lease.epoch, claim.request, claim.granted
        )


def _is_from_server(message: Message) -> bool:
    return isinstance(message.type, MessageType) and message.type.is_from_server
