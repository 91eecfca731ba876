"""The client's half of the protocol, without I/O.

`session/states.py` explains the protocol. Here, `Attachment` acquires the lease,
`Requests` numbers and resends requests, `ClientBlocks` tracks the operations of blocks,
and `ClientSession` dispatches events to them.

A request stays in flight until its reply arrives or its lease is lost, even if its
caller stops waiting. A late result is therefore never paired with another operation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from envserve.errors import (
    EnvserveError,
    LeaseLost,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
)
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.client.attachment import Attachment
from envserve.session.client.client_blocks import ClientBlocks
from envserve.session.client.liveness import PING_SECONDS, Timeouts, UnsolicitedLimit
from envserve.session.client.requests import Request, Requests
from envserve.session.states import ClientState
from envserve.slab import Rows
from envserve.wire.bodies import Attach, Drain, Pong
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.error_body import ErrorBody, exception_of
from envserve.wire.message import Buffer, Message, decode

Operation = TypeVar("Operation", int, Reset, Call)

_LOGGER: Final = logging.getLogger(__name__)
#: States whose `is_over` is true, computed once, because `receive` must be fast.
_FINAL_STATES: Final = tuple(state for state in ClientState if state.is_over)
#: Messages that are limited like those that match no request in flight, but do not
#: count as late.
_NOTICES: Final = frozenset(
    {MessageType.BUILDING, MessageType.PONG, MessageType.DRAIN, MessageType.ABSENT}
)


class ClientSession:
    """One client's side of the connection to a server.

    The transport calls `record_connect`, `record_disconnect` and `receive`, calls
    `advance` at `next_deadline` or soon after, and sends the frames in `outbox`.
    Only `submit_step`, `collect` and `client_blocks.refresh_absent` write rows.

    Attributes:
      requests: Requests that have no reply yet; and the session, boot and epoch
        numbers.
      outbox: Frames to send, by key, in sending order. The transport deletes entries
        that it has sent.
      attachment: State of the lease that this client holds on the server.
      num_late_messages: Number of messages that matched no request in flight.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        timeouts: Timeouts,
        *,
        session: int,
        now: float,
        client_name: str = "",
    ) -> None:
        """Start in state CONNECTING.

        The number of the first session is random in [1, 2**64); the numbers of later
        sessions are derived from it. Here and in all methods, `now` is in monotonic
        seconds. The server's log contains `client_name`.
        """
        self.num_late_messages = 0
        self.requests = requests = Requests(session, now)
        self.outbox = requests.outbox
        self.attachment = Attachment(address, attach, requests, timeouts, client_name)
        self._machine = self.attachment.machine
        self._unsolicited = UnsolicitedLimit()

    @property
    def address(self) -> str:
        """Address of the current server."""
        return self.attachment.address

    @property
    def state(self) -> ClientState:
        """State of the session."""
        return self._machine.state

    @property
    def error(self) -> EnvserveError | None:
        """Reason why the session is LOST; None otherwise."""
        return self.attachment.error

    @property
    def give_up_error(self) -> EnvserveError | None:
        """Reason why callers should stop waiting; None if they should not.

        The session continues to request a lease; see `Timeouts.pads_lost_rows`.
        """
        loss = self.attachment.lost_lease
        return None if loss is None else loss.give_up_error

    @property
    def rows(self) -> Rows:
        """Arrays that actions are read from and results are written to."""
        return self.client_blocks.rows

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The granted blocks."""
        return self.client_blocks.blocks

    @property
    def num_in_flight(self) -> int:
        """Number of blocks with an operation in flight or an uncollected result."""
        blocks = self.attachment.client_blocks
        return 0 if blocks is None else len(blocks.in_flight) + len(blocks.uncollected)

    def stats(self) -> dict[str, int]:
        """Return the session's counters by name."""
        return {
            "late_messages": self.num_late_messages,
            "resends": self.requests.num_resends,
            "reattaches": max(0, self.attachment.num_leases - 1),
            "unreachable_ms": int(1000 * self.requests.liveness.silent_seconds),
        }

    @property
    def client_blocks(self) -> ClientBlocks:
        """The blocks; raise LocalProtocolError before the first lease is granted."""
        if self.attachment.client_blocks is None:
            raise LocalProtocolError(
                f"{self.address}: the envs have not been granted yet"
            )
        return self.attachment.client_blocks

    # Calls by the user. A method that raises has changed nothing.

    def submit_step(self, blocks: Sequence[int], now: float) -> None:
        """Step blocks with the actions in `rows.action`."""
        self._submit(ClientBlocks.step, blocks, now)

    def submit_reset(self, resets: Sequence[Reset], now: float) -> None:
        """Reset distinct blocks."""
        self._submit(ClientBlocks.reset, resets, now)

    def submit_call(self, calls: Sequence[Call], now: float) -> None:
        """Access attributes of envs; raise CallError if the arguments are too long."""
        self._submit(ClientBlocks.call, calls, now)

    def _submit(
        self,
        begin: Callable[[ClientBlocks, Sequence[Operation]], list[Request]],
        operations: Sequence[Operation],
        now: float,
    ) -> None:
        attachment, state = self.attachment, self._machine.state
        client_blocks = attachment.client_blocks
        is_ready = state is ClientState.READY
        if client_blocks is None or not (is_ready or attachment.is_recovering):
            raise attachment.error or LocalProtocolError(
                f"{self.address}: expected a session in state READY; it is {state.name}"
            )
        requests = begin(client_blocks, operations)
        if self.requests.liveness.is_unreachable:
            client_blocks.absent_is_stale = True
        loss = attachment.lost_lease
        if loss is not None and loss.give_up_error is not None:
            client_blocks.give_up(loss.give_up_error)
            requests = [request for request in requests if request.is_step]
        if is_ready:
            for request in requests:
                self.requests.send(request, now)

    def collect(self) -> list[Outcome]:
        """Write the rows of new results; return the outcomes since the last call."""
        client_blocks = self.client_blocks
        outcomes = client_blocks.collect()
        if client_blocks.protocol_error is not None:
            self.attachment.abort(client_blocks.protocol_error)
        return outcomes

    def invalidate(self, text: str, now: float) -> None:
        """Discard all operations, and replace the lease with a new one.

        This is safe even if another method was interrupted at any line.
        """
        self.client_blocks.discard_all()
        if self.state is ClientState.READY or self.attachment.is_recovering:
            error = ServerError(f"{self.address}: {text}")
            self.attachment.lose_lease(error, now)

    def begin_close(self, now: float) -> None:
        """Return the envs to the server; change to CLOSED when the server confirms."""
        if not self.state.is_over and self.state is not ClientState.CLOSING:
            self.attachment.detach(now)

    # Events of the transport.

    def record_connect(self, now: float) -> None:
        """Record that the transport can send; resend requests if it reconnected."""
        self.requests.liveness.record_connect()
        if self.state is ClientState.CONNECTING:
            self.attachment.send_hello(now)
        elif self.requests.unanswered:
            self.requests.resend_all(now)
            if self.attachment.client_blocks is not None:
                self.attachment.client_blocks.absent_is_stale = True
        elif self.state is ClientState.READY:
            self.requests.ping(now)  # the PONG shows whether the server was restarted

    def record_disconnect(self, now: float) -> None:
        """Record that the connection is broken."""
        self.requests.liveness.record_disconnect(now)

    def receive(self, frames: Sequence[Buffer], now: float) -> None:
        """Handle any message from the server, even a malformed one."""
        requests, client_blocks = self.requests, self.attachment.client_blocks
        liveness = requests.liveness
        request = requests.step_answered_by(frames)
        if (  # the usual case, which runs at every step
            request is not None
            and client_blocks is not None
            and not liveness.is_unreachable
            and now - liveness.silent_since <= PING_SECONDS
            and client_blocks.accept_usual_reply(request, frames[0])
        ):
            liveness.silent_since, liveness.ping_at = math.inf, now + PING_SECONDS
            requests.remove(request.id)
            self.attachment.lost_lease = None
            return None
        try:
            message = decode(frames)
        except RemoteProtocolError:
            return self._count_unsolicited("malformed", frames, now)
        handler, state = _HANDLERS.get(message.type), self._machine.state
        if (
            handler is None
            or message.session != requests.session
            or state in _FINAL_STATES
        ):
            return self._count_unsolicited(message.type, frames, now)
        if liveness.is_unreachable and client_blocks is not None:
            client_blocks.absent_is_stale = True
            _LOGGER.warning("%s: the server replies again", self.address)
        liveness.record_message(now)
        # A WELCOME with a new boot id does not count as a restart, because it may
        # be a delayed message from before a restart.
        is_welcome = message.type is MessageType.WELCOME
        if requests.boot not in (0, message.boot) and not is_welcome:
            return self.attachment.handle_restart(now)
        try:
            if not handler(self, message, now):
                self._count_unsolicited(message.type, frames, now)
            elif message.type in _NOTICES:
                self._count_unsolicited(message.type, frames, now, 0)
        except RemoteProtocolError as error:
            self.abort(error)

    def _count_unsolicited(
        self, kind: int | str, frames: Sequence[Buffer], now: float, num_late: int = 1
    ) -> None:
        """Count a notice or an unmatched message; abort if there are too many."""
        self.num_late_messages += num_late
        num_pieces = getattr(self.attachment.client_blocks, "num_pieces", 0)
        try:
            self._unsolicited.count(kind, sum(map(len, frames)), num_pieces, now)
        except RemoteProtocolError as error:
            self.abort(error)

    def advance(self, now: float) -> None:
        """Resend overdue requests, send pings, and detect a lost server."""
        if self.state.is_over:
            return
        liveness, client_blocks = self.requests.liveness, self.attachment.client_blocks
        if client_blocks is not None and (seconds := liveness.detect_suspension(now)):
            self.requests.exclude_suspension(seconds)
            if (loss := self.attachment.lost_lease) is not None:
                loss.lost_at = min(loss.lost_at + seconds, now)
            client_blocks.absent_is_stale = True
        self.attachment.retry(now)
        has_resent = self.requests.resend_due(now)
        if client_blocks is not None and self.state is ClientState.READY:
            if has_resent or now >= liveness.ping_at:
                self.requests.ping(now)
            if now >= liveness.unreachable_at:
                liveness.is_unreachable = client_blocks.absent_is_stale = True
                problem = liveness.describe(now)
                _LOGGER.warning("%s: %s; waiting for the server", self.address, problem)
        if now >= self.attachment.give_up_at:
            self.attachment.give_up(now)

    def next_deadline(self) -> float:
        """Return the time at which to call `advance`; infinity if never."""
        if self.state.is_over:
            return math.inf
        attachment = self.attachment
        deadline = min(self.requests.next_resend(), attachment.give_up_at)
        if attachment.lost_lease is not None:
            deadline = min(deadline, attachment.lost_lease.retry_at)
        if self.state is ClientState.READY:
            liveness = self.requests.liveness
            deadline = min(deadline, liveness.ping_at, liveness.unreachable_at)
        return deadline

    def abort(self, error: RemoteProtocolError) -> None:
        """End the session, because its server violates the protocol."""
        self.attachment.abort(RemoteProtocolError(f"{self.address}: {error}"))

    def __repr__(self) -> str:
        return (
            f"<ClientSession {self.address} {self.state.name}, "
            f"{self.num_in_flight} in flight>"
        )


# Handlers, by type of message. Each returns whether the message was expected.


def _on_welcome(session: ClientSession, message: Message, now: float) -> bool:
    if session.state is not ClientState.HELLO_SENT:
        return False
    session.attachment.accept_welcome(message, now)
    return True


def _on_granted(session: ClientSession, message: Message, now: float) -> bool:
    if session.state is not ClientState.ATTACHING:
        return False
    session.attachment.accept_grant(message, now)
    return True


def _on_result(session: ClientSession, message: Message, now: float) -> bool:
    """Handle a RESULT or CALL_RESULT for a whole request or one of its blocks."""
    requests, attachment = session.requests, session.attachment
    request = requests.answered_by(message)
    if request is None or attachment.client_blocks is None:
        return False
    attachment.client_blocks.accept_result(request, message)
    requests.record_reply(request, message)
    attachment.lost_lease = None  # the new lease has produced a result
    return True


def _on_absent(session: ClientSession, message: Message, now: float) -> bool:
    requests, client_blocks = session.requests, session.attachment.client_blocks
    request = requests.unanswered.get(message.request)
    if request is None or client_blocks is None or message.epoch != requests.epoch:
        return False
    client_blocks.mark_absent(request, message)
    requests.record_running(request, now)
    return True


def _on_pong(session: ClientSession, message: Message, now: float) -> bool:
    running = Pong.decode(message.body).running
    client_blocks = session.attachment.client_blocks
    changed = session.requests.record_pong(message.request, running, now)
    if changed and client_blocks is not None:
        client_blocks.absent_is_stale = True
    if ignored := [request for request in changed if request.is_ignored]:
        _LOGGER.warning("%s: %s", session.address, ignored[0].describe_stall(now))
    return True


def _on_detached(session: ClientSession, message: Message, now: float) -> bool:
    if session.state is ClientState.CLOSING:
        session.attachment.close()
    elif session.state is ClientState.READY:
        text = "the server ended the lease with a DETACHED that was not requested"
        error = LeaseLost(f"{session.address}: {text}")
        session.attachment.lose_lease(error, now)
    else:
        return False
    return True


def _on_drain(session: ClientSession, message: Message, now: float) -> bool:
    seconds = Drain.decode(message.body).grace_ms / 1000
    # A faulty server may send this message again and again.
    if (more := session.attachment.throttle.admit("drain", now)) is not None:
        _LOGGER.warning(
            "%s: the server is draining; it ends the lease when each env has ended an "
            "episode, at the latest in %g s, and then stops%s",
            session.address,
            seconds,
            more,
        )
    return True


def _on_error(session: ClientSession, message: Message, now: float) -> bool:
    body = ErrorBody.decode(message.body)
    requests, attachment = session.requests, session.attachment
    request = requests.unanswered.get(message.request)
    ends_session = (
        body.code in (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
        or message.request == attachment.attach_id
        or (request is not None and request.type is MessageType.HELLO)
    )
    if session.state is ClientState.CLOSING and (ends_session or request is not None):
        attachment.close()
    elif ends_session:
        attachment.handle_error(body, now)
    elif request is not None and attachment.client_blocks is not None:
        uses_seq = body.executed is not Executed.NO
        error = exception_of(body, session.address)
        attachment.client_blocks.fail(request, error, uses_seq=uses_seq)
        requests.remove(request.id)
        attachment.lost_lease = None  # as in `_on_result`
    else:
        return False
    return True


_HANDLERS: Final[
    Mapping[MessageType | int, Callable[[ClientSession, Message, float], bool]]
] = {
    MessageType.WELCOME: _on_welcome,
    MessageType.GRANTED: _on_granted,
    MessageType.BUILDING: lambda *_: True,  # only ends the silence; see `receive`
    MessageType.RESULT: _on_result,
    MessageType.CALL_RESULT: _on_result,
    MessageType.PONG: _on_pong,
    MessageType.DETACHED: _on_detached,
    MessageType.DRAIN: _on_drain,
    MessageType.ABSENT: _on_absent,
    MessageType.ERROR: _on_error,
}
