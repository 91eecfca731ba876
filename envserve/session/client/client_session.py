"""The client's half: attaches, sends operations, and pairs answers with them.

`states` has the theory; `attachment` gets envs, `requests` sends and sends again,
`client_blocks` tracks the blocks. A request is in flight until it is answered or its
lease is lost, however long its caller waits: no result is taken for that of another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

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
from envserve.wire.handshake import ErrorBody, exception_of
from envserve.wire.message import Buffer, Message, decode

_LOGGER: Final = logging.getLogger(__name__)
_OVER: Final = tuple(state for state in ClientState if state.is_over)  # no call a step
_ATTACHING_TYPES: Final = (MessageType.HELLO, MessageType.ATTACH)
#: What answers nothing, and yet is not late.
_NEWS: Final = frozenset(
    {MessageType.BUILDING, MessageType.PONG, MessageType.DRAIN, MessageType.ABSENT}
)


class ClientSession:
    """One client's conversation with one server.

    The shell passes on what it receives and whether there is a connection, calls
    `advance` at `next_deadline` or a little later, and sends what is in `outbox`.
    Rows are written by `take_outcomes`, and by `operations.is_ready`, only.

    Attributes:
      requests: What is sent, and waits for an answer.
      outbox: What the shell has to send: frames by key, in their order. It deletes what
        it has sent.
      attachment: How envs are got.
      late_messages: How many messages came that nothing waits for.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        timeouts: Timeouts,
        *,
        session: int,
        now: float,
        client: str = "",
    ) -> None:
        """Starts CONNECTING.

        Args:
          address: The server's, for messages.
          attach: Which envs to ask for.
          timeouts: How long to wait for the server.
          session: Random number in [1, 2**64), from which those of later leases follow.
          now: Monotonic seconds, as everywhere below.
          client: Who we are, for the server's log.
        """
        self.late_messages = 0
        self.requests = requests = Requests(session, now)
        self.outbox = requests.outbox
        self.attachment = Attachment(address, attach, requests, timeouts, client)
        self._machine = self.attachment.machine
        self._unsolicited = UnsolicitedLimit()

    @property
    def address(self) -> str:
        """The server's."""
        return self.attachment.address

    @property
    def state(self) -> ClientState:
        """Where the conversation is."""
        return self._machine.state

    @property
    def error(self) -> EnvserveError | None:
        """Why the session is LOST."""
        return self.attachment.error

    @property
    def give_up_error(self) -> EnvserveError | None:
        """Why nobody should wait any more for envs that it goes on to ask for."""
        loss = self.attachment.loss
        return None if loss is None else loss.given_up

    @property
    def rows(self) -> Rows:
        """Where actions are read from and results are written to."""
        return self.operations.rows

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks."""
        return self.operations.blocks

    @property
    def num_in_flight(self) -> int:
        """How many blocks have an operation whose outcome was not taken."""
        operations = self.attachment.operations
        return len(operations.in_flight) + len(operations.ended) if operations else 0

    def stats(self) -> dict[str, int]:
        """Returns how often what has happened."""
        return {
            "late_messages": self.late_messages,
            "resends": self.requests.num_resends,
            "reattaches": max(0, self.attachment.num_leases - 1),
            "unreachable_ms": int(1000 * self.requests.liveness.silent_seconds),
        }

    @property
    def operations(self) -> ClientBlocks:
        """What the blocks are up to; raises LocalProtocolError before READY."""
        if self.attachment.operations is None:
            raise LocalProtocolError(f"{self.address}: the envs are not granted yet")
        return self.attachment.operations

    # What the caller wants. Nothing is changed by what is refused.

    def submit_step(self, blocks: Sequence[int], now: float) -> None:
        """Asks for a step of these blocks with the actions in `rows.action`."""
        self._submit(self._usable().step(blocks), now)

    def submit_reset(self, resets: Sequence[Reset], now: float) -> None:
        """Asks for resets, each of another block."""
        self._submit(self._usable().reset(resets), now)

    def submit_call(self, calls: Sequence[Call], now: float) -> None:
        """Asks for attribute access; raises CallError for arguments too long."""
        self._submit(self._usable().call(calls), now)

    def _usable(self) -> ClientBlocks:
        attachment, state = self.attachment, self._machine.state
        operations = attachment.operations
        if operations is not None and (
            state is ClientState.READY or attachment.is_recovering
        ):
            return operations
        raise attachment.error or LocalProtocolError(
            f"{self.address}: expected a session that is READY; it is {state.name}"
        )

    def _submit(self, requests: list[Request], now: float) -> None:
        if self.requests.liveness.is_unreachable:
            self.operations.is_stale = True
        if self._machine.state is ClientState.READY:
            for request in requests:
                self.requests.send(request, now)

    def take_outcomes(self) -> list[Outcome]:
        """Writes rows; returns the operations that have ended since the last call."""
        operations = self.operations
        outcomes = operations.take_outcomes()
        if operations.violation is not None and not self.state.is_over:
            self.refuse(operations.violation)
        return outcomes

    def invalidate(self, text: str, now: float) -> None:
        """Gives the envs back, and asks for others; forgets what is in flight.

        It may be called whatever an interrupt has left half done.
        """
        self.operations.forget()
        if self.state is ClientState.READY or self.attachment.is_recovering:
            error = ServerError(f"{self.address}: {text}")
            self.attachment.lose_lease(error, now)

    def begin_close(self, now: float) -> None:
        """Gives the envs back; the state is CLOSED when the server has them."""
        if not self.state.is_over and self.state is not ClientState.CLOSING:
            self.attachment.give_back(now)

    # What the transport brings.

    def connected(self, now: float) -> None:
        """Notes that the transport can send, for the first time or anew."""
        self.requests.liveness.note_connected()
        if self.state is ClientState.CONNECTING:
            self.attachment.send_hello(now)
        elif self.requests.waiting:
            self.requests.resend_all(now)
        elif self.state is ClientState.READY:
            self.requests.ping(now)  # it may be another server by now

    def disconnected(self, now: float) -> None:
        """Notes that it no longer can."""
        self.requests.liveness.note_disconnected(now)

    def receive(self, frames: Sequence[Buffer], now: float) -> None:
        """Takes what the server has sent, whatever it is."""
        try:
            message = decode(frames)
        except RemoteProtocolError:
            return self._count_unsolicited("no message", frames, now)
        requests = self.requests
        handler, state = _HANDLERS.get(message.type), self._machine.state
        if handler is None or message.session != requests.session or state in _OVER:
            return self._count_unsolicited(message.type, frames, now)
        liveness, operations = requests.liveness, self.attachment.operations
        if liveness.is_unreachable or now - liveness.silent_since > PING_SECONDS:
            if liveness.is_unreachable and operations is not None:
                operations.is_stale = True
            liveness.note_message(now)
        else:  # the usual case, in line because it is done at every step
            liveness.silent_since, liveness.ping_at = math.inf, now + PING_SECONDS
        # Not of a WELCOME that nobody waits for: it may be of a server of the past.
        is_welcome = message.type is MessageType.WELCOME
        if requests.boot not in (0, message.boot) and not is_welcome:
            return self.attachment.handle_restart(now)
        try:
            if not handler(self, message, now):
                self._count_unsolicited(message.type, frames, now)
            elif message.type in _NEWS:
                self._count_unsolicited(message.type, frames, now, 0)
        except RemoteProtocolError as error:
            self.refuse(error)

    def _count_unsolicited(
        self, what: int | str, frames: Sequence[Buffer], now: float, num_late: int = 1
    ) -> None:
        """Counts what answers nothing; ends the session if that has no end."""
        self.late_messages += num_late
        if self.state.is_over:
            return
        num_pieces = getattr(self.attachment.operations, "num_pieces", 0)
        try:
            self._unsolicited.count(what, sum(map(len, frames)), num_pieces, now)
        except RemoteProtocolError as error:
            self.refuse(error)

    def advance(self, now: float) -> None:
        """Sends again what is due, pings, and notices that the server is lost."""
        if self.state.is_over:
            return
        liveness, operations = self.requests.liveness, self.attachment.operations
        if operations is not None:
            liveness.note_awake(now)
        self.attachment.retry(now)
        self.requests.resend_due(now)
        if operations is not None and self.state is ClientState.READY:
            if now >= liveness.ping_at:
                self.requests.ping(now)
            if now >= liveness.unreachable_at:
                liveness.is_unreachable = operations.is_stale = True
                _LOGGER.warning("%s: no answer, or no connection", self.address)
        if now >= self.attachment.lost_at:
            self.attachment.give_up(now)

    def next_deadline(self) -> float:
        """When `advance` has to be called next."""
        if self.state.is_over:
            return math.inf
        attachment = self.attachment
        deadline = min(self.requests.next_resend(), attachment.lost_at)
        if attachment.loss is not None:
            deadline = min(deadline, attachment.loss.retry_at)
        if self.state is ClientState.READY:
            liveness = self.requests.liveness
            deadline = min(deadline, liveness.ping_at, liveness.unreachable_at)
        return deadline

    def refuse(self, error: RemoteProtocolError) -> None:
        """Ends the session, since its server breaks the protocol."""
        self.attachment.refuse(RemoteProtocolError(f"{self.address}: {error}"))

    def __repr__(self) -> str:
        return (
            f"<ClientSession {self.address} {self.state.name}, "
            f"{self.num_in_flight} in flight>"
        )


# What each type of message does; they tell whether anything has waited for it.


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
    """Takes a RESULT or CALL_RESULT, of a whole request or of one of its blocks."""
    requests, attachment = session.requests, session.attachment
    request = requests.answered_by(message)
    if request is None or attachment.operations is None:
        return False
    attachment.operations.end(request, message)
    requests.note_answer(request, message)
    attachment.loss = None  # the new lease serves
    return True


def _on_absent(session: ClientSession, message: Message, now: float) -> bool:
    requests, operations = session.requests, session.attachment.operations
    request = requests.waiting.get(message.request)
    if request is None or operations is None or message.epoch != requests.epoch:
        return False
    operations.mark_absent(request, message)
    request.resend_at = now + request.delay  # the server has it
    return True


def _on_pong(session: ClientSession, message: Message, now: float) -> bool:
    session.requests.postpone_running(Pong.decode(message.body).running, now)
    return True


def _on_detached(session: ClientSession, message: Message, now: float) -> bool:
    if session.state is ClientState.CLOSING:
        session.attachment.close()
    elif session.state is ClientState.READY:
        error = LeaseLost(f"{session.address}: the server says we have detached")
        session.attachment.lose_lease(error, now)
    return True


def _on_drain(session: ClientSession, message: Message, now: float) -> bool:
    _LOGGER.warning(
        "%s: the server is draining: it gives envs up once each of them has ended "
        "an episode, or in %g s, and stops",
        session.address,
        Drain.decode(message.body).grace_ms / 1000,
    )
    return True


def _on_error(session: ClientSession, message: Message, now: float) -> bool:
    body = ErrorBody.decode(message.body)
    requests, attachment = session.requests, session.attachment
    request = requests.waiting.get(message.request)
    ends_session = (
        body.code in (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
        or message.request == attachment.request
        or (request is not None and request.type in _ATTACHING_TYPES)
    )
    if session.state is ClientState.CLOSING and (ends_session or request is not None):
        attachment.close()
    elif ends_session:
        attachment.accept_refusal(body, now)
    elif request is not None and attachment.operations is not None:
        uses_seq = body.executed is not Executed.NO
        error = exception_of(body, session.address)
        attachment.operations.fail(request, error, uses_seq=uses_seq)
        requests.remove(request.id)
    else:
        return False
    return True


_HANDLERS: Final[
    Mapping[MessageType | int, Callable[[ClientSession, Message, float], bool]]
] = {
    MessageType.WELCOME: _on_welcome,
    MessageType.GRANTED: _on_granted,
    MessageType.BUILDING: lambda *_: True,  # the silence has been ended
    MessageType.RESULT: _on_result,
    MessageType.CALL_RESULT: _on_result,
    MessageType.PONG: _on_pong,
    MessageType.DETACHED: _on_detached,
    MessageType.DRAIN: _on_drain,
    MessageType.ABSENT: _on_absent,
    MessageType.ERROR: _on_error,
}
