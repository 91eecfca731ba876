"""The server's half of the protocol, without I/O.

`session/states.py` explains the protocol. `ServerProtocol` passes the operations of a
granted lease to its `Lease`, and handles all other messages itself, with `LeaseTable`.
Every message of a session renews its lease.

Its methods return decisions, such as `Reply` or `StartPool`. The event loop carries
them out, and reports their results by calling other methods, such as `pool_ready`. All
methods are called in the thread of the event loop.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from envserve.errors import EnvserveError, RemoteProtocolError
from envserve.keys.formats import INVITATION
from envserve.keys.grant import Grant
from envserve.lane import Block, Outcome
from envserve.session.server.decisions import (
    BeginDrain,
    Decision,
    EnrolKey,
    Reply,
    ReplyFrame,
    ReplyStatus,
    ReplyWelcome,
    SessionId,
)
from envserve.session.server.lease_table import LeaseRecord, LeaseTable
from envserve.session.server.permissions import RateLimited, Rejection
from envserve.session.server.quotas import Quotas
from envserve.session.server.reply_builder import (
    ReplyBuilder,
    lease_lost,
    server_draining,
    version_mismatch,
)
from envserve.session.states import LeaseState
from envserve.settings import HostSettings
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Drain, FrameRequest, Pong
from envserve.wire.constants import (
    DRAIN_WORD,
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
    MessageType,
)
from envserve.wire.error_body import ErrorBody, error_body_of
from envserve.wire.handshake import Hello, Join
from envserve.wire.message import Buffer, Message, Peer, decode, peek

_LOGGER: Final = logging.getLogger(__name__)

#: Servers send message types from this number on, and clients send lower types.
_FIRST_SERVER_TYPE: Final = 128
#: Types of requests that the envs execute.
_OPERATIONS: Final = frozenset({MessageType.STEP, MessageType.RESET, MessageType.CALL})
#: Types of the requests that `RequestDecision`s reply to, and of the replies.
_REPLY_TYPES: Final[Mapping[MessageType | int, MessageType]] = {
    MessageType.HELLO: MessageType.WELCOME,
    MessageType.STATUS: MessageType.STATUS_RESULT,
    MessageType.FRAME: MessageType.FRAME_RESULT,
    MessageType.JOIN: MessageType.JOINED,
}
#: Seconds that a FRAME request adds to its user's leaky bucket, which holds one second.
#: A user can therefore request 32 rendered frames or one flight record per second.
_FRAME_SECONDS: Final = 1 / 32
_RECORD_SECONDS: Final = 1.0
#: A stop does not wait for clients that have sent nothing for this number of seconds.
#: Other clients send a PING every second.
_SILENT_SECONDS: Final = 5.0


class ServerProtocol:
    """The sessions of all clients of one server.

    The caller must carry out the decisions that a method returns, in order.

    Attributes:
      boot: Boot id, drawn at random when the server starts, to detect restarts.
      leases: The leases, from ATTACH until their envs are free.
      quotas: User quotas.
      num_dropped_messages: Number of messages that could not be answered.
      refusals: Number of ERRORs sent, by name of the error code.
    """

    def __init__(
        self,
        settings: HostSettings,
        env_names: tuple[str, ...],
        boot: int,
        grant_of: Callable[[str], Grant | None] | None = None,
    ) -> None:
        """Create the protocol state of a server that has no sessions yet.

        `boot` is a random number in [1, 2**64). For `grant_of`, see `Quotas`.
        """
        self.boot = boot
        self.num_dropped_messages = 0
        self._settings = settings
        self._reply_builder = ReplyBuilder(boot, shows_paths=settings.debug_errors)
        self.refusals = self._reply_builder.refusals
        self.quotas = Quotas(settings, grant_of)
        self.leases = LeaseTable(settings, env_names, self._reply_builder, self.quotas)
        self._next_frame_due: dict[str, float] = {}
        self._is_stopping = False

    @property
    def has_ended(self) -> bool:
        """Whether the drain or stop of the server is complete.

        A drain waits until all leases have ended. A stop also waits until their clients
        have acknowledged the end; its caller limits this wait to a few seconds.
        """
        leases = self.leases
        is_waiting = leases or (self._is_stopping and leases.unnotified)
        return leases.is_ending and not is_waiting

    # Messages.

    def receive(
        self, peer: Peer, frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        """Handle any message from a peer, even a malformed one.

        Another user's session number is treated like an unknown one.
        """
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            header = _peek(peer, frames)
            if header is None:
                self.num_dropped_messages += 1
                return []
            return self.reject(header, error, now)
        message.peer = peer
        try:
            # This is the fast path, for operations of a granted lease.
            record = self.leases.get((peer[-1], message.session))
            if (
                record is not None
                and record.lease is not None
                and message.type in _OPERATIONS
                and message.boot == self.boot
                and message.epoch == record.number
                and message.version == VERSION
            ):
                record.last_message_at = now
                record.request.peer = peer  # the client may have reconnected
                return record.lease.handle(message, now)
            return self._dispatch(message, record, now)
        except (Rejection, RemoteProtocolError) as error:
            return self.reject(message, error, now)

    def reject(
        self, request: Message, error: Rejection | RemoteProtocolError, now: float
    ) -> list[Decision]:
        """Reply to a rejected or malformed request with an ERROR."""
        builder = self._reply_builder
        if isinstance(error, RemoteProtocolError):
            return [builder.rejection(request, ErrorCode.BAD_MESSAGE, str(error))]
        audit = self.leases.audit_rejection(error, request.peer[-1], now)
        return [audit, builder.error(request, error.body)]

    def reply(
        self, request: Message, body: bytes = b"", payload: bytes = b""
    ) -> list[Decision]:
        """Reply to the request of a `RequestDecision`."""
        kind = _REPLY_TYPES[request.type]
        return [self._reply_builder.reply(request, kind, body, payload=payload)]

    def receive_failed(self, peer: Peer, frames: Sequence[Buffer]) -> list[Decision]:
        """Reply to a message whose handling raised an exception, and end its session.

        The message may have been handled in part, so the session cannot continue.
        """
        header = _peek(peer, frames)
        return [] if header is None else self.request_failed(header)

    def request_failed(self, request: Message) -> list[Decision]:
        """Reply to a request that caused an exception, and end its session."""
        body = ErrorBody(
            code=ErrorCode.INTERNAL,
            executed=Executed.UNKNOWN,
            text="the server failed to handle this message; see its log",
        )
        reply = self._reply_builder.error(request, body)
        record = self.leases.get((request.peer[-1], request.session))
        if record is None or request.boot != self.boot:
            return [reply]
        return [reply, *self.leases.close(record, body)]

    def _dispatch(
        self, message: Message, record: LeaseRecord | None, now: float
    ) -> list[Decision]:
        """Handle a message that is not an operation of a granted lease."""
        kind = message.type
        if kind is MessageType.JOIN or message.peer[-1].startswith(INVITATION):
            return self._on_join(message)
        if kind is MessageType.HELLO:
            return self._on_hello(message)
        if _is_from_server(message):
            self.num_dropped_messages += 1  # a reply could start an endless loop
            return []
        if message.version != VERSION:
            raise version_mismatch(message.version)
        if kind in (MessageType.STATUS, MessageType.FRAME):
            return self._on_observer_request(message, now)
        if not isinstance(kind, MessageType):
            raise Rejection(ErrorCode.UNSUPPORTED, f"unknown message type {kind}")
        if kind is MessageType.ASK_DRAIN:
            return self._on_ask_drain(message)
        if message.boot != self.boot:
            return [self._reply_builder.fenced(message, "server was started")]
        if kind is MessageType.DETACH:
            self.leases.unnotified.discard((message.peer[-1], message.session))
        if record is None:
            return self._on_unknown_session(message, now)
        record.last_message_at = now
        if kind is MessageType.ATTACH:
            return self._on_repeated_attach(record, message, now)
        if kind is MessageType.DETACH:
            record.request = message
            return self.leases.close(record, None)
        if record.state is LeaseState.CLOSING:
            return [self._reply_builder.session_ended(message, record.reason)]
        if record.lease is None:
            if kind is not MessageType.PING:
                raise Rejection(
                    ErrorCode.BAD_MESSAGE, "the lease has not been granted yet"
                )
            pong = Pong(running={})
        elif message.epoch != record.number:
            return [self._reply_builder.fenced(message, "lease was granted")]
        else:
            record.request.peer = message.peer
            pong = record.lease.pong(now)
        return [self._reply_builder.reply(message, MessageType.PONG, pong.encode())]

    def _on_join(self, message: Message) -> list[Decision]:
        """Handle a JOIN; ignore other messages sent with the key of an invitation."""
        if message.type is not MessageType.JOIN:
            return []
        if message.version != VERSION:
            raise version_mismatch(message.version)
        if not self.quotas.uses_keys:
            raise RemoteProtocolError("this server uses no keys")
        return [EnrolKey(message, Join.decode(message.body).public)]

    def _on_hello(self, message: Message) -> list[Decision]:
        hello = Hello.decode(message.body)
        if hello.min_version > VERSION or hello.max_version < MIN_VERSION:
            raise version_mismatch(f"{hello.min_version} to {hello.max_version}")
        if message.session:
            session = message.peer[-1], message.session
            self.leases.record_client_name(session, hello.client)
        self.quotas.of(message.peer[-1])  # raises unless the key is still valid
        return [ReplyWelcome(message)]

    def _on_observer_request(self, request: Message, now: float) -> list[Decision]:
        """Return the decision that replies to STATUS or FRAME, which need no lease.

        A user with a key can only observe their own leases. Users without a key,
        including the operator of the server, can observe all leases. If a user sends
        too many FRAME requests, return an empty list; the client then resends its
        request.
        """
        user = request.peer[-1]
        self.quotas.of(user)  # raises unless the key is still valid
        if request.type is MessageType.STATUS:
            return [ReplyStatus(request)]
        due_at = max(self._next_frame_due.get(user, now), now)
        if due_at >= now + 1.0:
            return []
        frame_request = FrameRequest.decode(request.body)
        seconds = _RECORD_SECONDS if frame_request.record else _FRAME_SECONDS
        self._next_frame_due[user] = due_at + seconds
        for record in self.leases.visible_to(user):
            if record.number == frame_request.lease:
                return [ReplyFrame(request, record.session, frame_request)]
        text = f"lease {frame_request.lease} does not exist, or belongs to another user"
        raise Rejection(ErrorCode.LEASE_LOST, text)

    def _on_ask_drain(self, message: Message) -> list[Decision]:
        if message.peer[-1] != "local":
            raise Rejection(
                ErrorCode.REFUSED,
                "only the user who runs the server can drain it, over ipc or with the "
                "server's keys; other users can close their clients",
            )
        if message.body != DRAIN_WORD:
            raise RemoteProtocolError("expected the body of an ASK_DRAIN")
        body = Drain(grace_ms=int(1000 * self._settings.drain_grace_seconds)).encode()
        return [
            BeginDrain(),
            self._reply_builder.reply(message, MessageType.DRAIN, body),
        ]

    def _on_unknown_session(self, message: Message, now: float) -> list[Decision]:
        """Handle a message of a session that is not in the lease table."""
        ended = self.leases.ended_sessions[message.peer[-1]]
        if message.session in ended:
            return [self._reply_builder.session_ended(message, ended[message.session])]
        if message.type is MessageType.DETACH:
            return [self._reply_builder.session_ended(message, None)]
        if message.type is not MessageType.ATTACH:
            text = "this session has no lease on this server; attach again"
            return [self._reply_builder.rejection(message, ErrorCode.LEASE_LOST, text)]
        if message.session == 0:
            raise RemoteProtocolError("expected a nonzero session number")
        if self.leases.is_ending:
            raise server_draining()
        try:
            self.leases.add(message, now)
        except RateLimited as rejection:  # the ATTACH can succeed when it is resent
            audit = self.leases.audit_rejection(rejection, message.peer[-1], now)
            return [audit, self._reply_builder.building(message)]
        return [*self.leases.start_builds(), self._reply_builder.building(message)]

    def _on_repeated_attach(
        self, record: LeaseRecord, message: Message, now: float
    ) -> list[Decision]:
        if message.body != record.attach_body:
            raise RemoteProtocolError(
                "this session has already attached with different arguments"
            )
        if record.state is LeaseState.CLOSING:
            return [self._reply_builder.session_ended(message, record.reason)]
        record.request = message
        if record.state is LeaseState.GRANTED and record.grant_limiter.allow(now):
            return [self._granted_reply(record)._replace(limiter=record.grant_limiter)]
        return [self._reply_builder.building(message, now - record.attached_at)]

    def _granted_reply(self, record: LeaseRecord) -> Reply:
        request = dataclasses.replace(record.request, epoch=record.number)
        return self._reply_builder.reply(
            request, MessageType.GRANTED, record.granted_body
        )

    # Events of pools.

    def pool_ready(
        self,
        session_id: SessionId,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        now: float,
    ) -> list[Decision]:
        """Grant a lease whose envs are built, with the blocks and rows of its pool."""
        record = self.leases[session_id]
        if record.state is not LeaseState.BUILDING:
            return []
        try:
            self.leases.grant(record, spec, blocks, rows)
        except Rejection as rejection:
            body = replace(rejection.body, executed=Executed.UNKNOWN)
            return self.leases.close(record, body)
        seconds, extra = now - record.attached_at, {"fields": record.log_fields}
        text = "%s, granted to %s after %.1f s"
        _LOGGER.info(text, record, record.client, seconds, extra=extra)
        starts = self.leases.start_builds()
        return [record.audit_event("attached"), self._granted_reply(record), *starts]

    def pool_failed(
        self, session_id: SessionId, error: EnvserveError
    ) -> list[Decision]:
        """End a session whose envs could not be built, or are permanently lost."""
        record = self.leases[session_id]
        body = error_body_of(error)
        if record.lease is None and body.code is ErrorCode.INTERNAL:
            # The server may have run out of memory or file descriptors, for example.
            # A client that replaces a lost lease can try again.
            code = ErrorCode.ENV_START_FAILED
            body = replace(body, code=code, executed=Executed.NO)
        return self.leases.close(record, body)

    def pool_finished(
        self,
        session_id: SessionId,
        outcomes: Sequence[Outcome],
        absent: Collection[int] = (),
    ) -> list[Decision]:
        """Reply to operations that have ended or become absent; see `Lease.finish`."""
        record = self.leases[session_id]
        if record.lease is None:  # the lease is CLOSING
            return []
        replies = record.lease.finish(outcomes, absent)
        if record.unfinished_rows is not None:
            # An end counts once it is answered, which may be after the other blocks of
            # the request are done.
            for block in record.lease.answered_blocks:
                record.unfinished_rows.difference_update(record.lease.ended_rows(block))
            if not record.unfinished_rows:
                text = "the server was drained; each env of the lease ended an episode"
                replies += self.leases.close(record, lease_lost(text))
        return replies

    def pool_broken(
        self, session_id: SessionId, error: EnvserveError
    ) -> list[Decision]:
        """Free the envs of a session whose pool failed and is already closed."""
        record = self.leases.get(session_id)
        if record is None:
            return []
        self.leases.close(record, error_body_of(error))
        return self.pool_closed(session_id)

    def pool_closed(self, session_id: SessionId) -> list[Decision]:
        """Free the envs of a session whose workers have exited; notify its client."""
        return self.leases.remove(session_id)

    # Ending leases and the server.

    def expire_leases(self, now: float) -> list[Decision]:
        """End the leases of clients that were silent for too long."""
        decisions: list[Decision] = []
        for record in self.leases.values():
            # Compute the same sum as `next_deadline`, so that both are rounded equally.
            is_silent = now >= record.last_message_at + self._settings.lease_seconds
            if is_silent and record.state is not LeaseState.CLOSING:
                text = f"its client was silent for {now - record.last_message_at:.1f} s"
                decisions += self.leases.close(record, lease_lost(text))
                # Do not wait until the client is notified, because it is gone.
                self.leases.unnotified.discard(record.session)
        return decisions

    def next_deadline(self) -> float:
        """Return the time at which to call `expire_leases`; infinity if never."""
        leases = self.leases.values()
        times = (r.last_message_at for r in leases if r.state is not LeaseState.CLOSING)
        return min(times, default=math.inf) + self._settings.lease_seconds

    def begin_drain(self, grace_seconds: float) -> list[Decision]:
        """Stop granting leases; end each lease once all its envs have ended an episode.

        Notify the clients that the event loop will call `stop` in `grace_seconds`.
        """
        self.leases.is_ending = True
        body = Drain(grace_ms=int(1000 * grace_seconds)).encode()
        decisions: list[Decision] = []
        for record in self.leases.values():
            if record.state is LeaseState.BUILDING:
                decisions += self.leases.close(record, server_draining().body)
            elif record.lease is not None:
                record.unfinished_rows = set(range(record.attach.num_envs))
                header = Message(
                    MessageType.ATTACH,
                    session=record.session[1],
                    epoch=record.number,
                    peer=record.request.peer,
                )
                reply = self._reply_builder.reply(header, MessageType.DRAIN, body)
                decisions.append(reply)
        if count := len(self.leases):
            _LOGGER.info("draining; leases: %d, grace: %g s", count, grace_seconds)
        return decisions

    def stop(self, now: float, why: str = "") -> list[Decision]:
        """End all sessions before the server stops.

        Send `why`, the reason for ending a drain early, to the clients; "" without a
        drain.
        """
        text = f"the server was drained: {why}" if why else "the server was stopped"
        leases, decisions = self.leases, list[Decision]()
        leases.is_ending = self._is_stopping = True
        for record in leases.values():
            if record.reason is not None:  # already CLOSING, not after a DETACH
                leases.unnotified.add(record.session)
            decisions += leases.close(record, lease_lost(text))
            if now >= record.last_message_at + _SILENT_SECONDS:
                leases.unnotified.discard(record.session)  # its client is gone
        return decisions


def _peek(peer: Peer, frames: Sequence[Buffer]) -> Message | None:
    """Return the header of a malformed message; None if it cannot be answered."""
    message = peek(frames)
    if message is None or _is_from_server(message):
        return None
    message.peer = peer
    return message


def _is_from_server(message: Message) -> bool:
    return message.type >= _FIRST_SERVER_TYPE  # also true for types added later
