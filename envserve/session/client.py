"""The client's half: attaches, sends operations, and pairs answers with them.

`states` says where a conversation can be, `attachment` how envs are got, `pairing` what
passes for an answer, `recovery` how a loss is got over. A request is in flight until it
is answered or its lease is lost, however long its caller waits: no result is ever taken
for that of a later operation.
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
    ServerLost,
)
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.attachment import Attachment
from envserve.session.away import Away
from envserve.session.operations import Operations
from envserve.session.pairing import Pairing
from envserve.session.recovery import Recovery
from envserve.session.sender import Sender
from envserve.session.states import ClientState
from envserve.session.translation import exception_of
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import (
    Attach,
    Buffer,
    Drain,
    ErrorBody,
    ErrorCode,
    Message,
    MessageType,
    decode,
)

__all__ = ["ClientSession"]

_LOGGER: Final = logging.getLogger(__name__)
_ATTACHING_TYPES: Final = (MessageType.HELLO, MessageType.ATTACH)
_LOSSES: Final = (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
#: Why a server may have no envs now, and have some later.
_BUSY: Final = (ErrorCode.ENVS_BUSY, ErrorCode.INTERNAL)


class ClientSession:
    """One client's conversation with one server.

    The shell passes on what it receives and whether there is a connection, calls
    `advance` at `next_deadline`, and sends what is in `outbox`.

    Attributes:
      outbox: What the shell has to send.
      late_messages: How many messages came that nothing waits for.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        *,
        session: int,
        now: float,
        timeout_seconds: float = 10.0,
        server_lost_after_seconds: float = 60.0,
        pads_when_lost: bool = False,
        client: str = "",
    ) -> None:
        """Starts CONNECTING.

        Args:
          address: The server's, for messages.
          attach: Which envs to ask for.
          session: Random number in [1, 2**64), from which those of later leases follow.
          now: Monotonic seconds, as everywhere below.
          timeout_seconds: Longest silence before the envs are granted.
          server_lost_after_seconds: How long to wait for a server that is silent, or
            for envs that are lost, after that.
          pads_when_lost: Whether to give padding then, and try on, instead of ending.
          client: Who we are, for the server's log.
        """
        self.late_messages = 0
        self._address = address
        self._sender = Sender(session, now)
        self.outbox = self._sender.outbox
        self._requests = self._sender.requests
        self._silence = self._sender.silence
        self._has_warned = False  # of this silence
        self._attachment = Attachment(address, attach, self._sender, client)
        self._pairing = Pairing(self._attachment, self._sender)
        self._recovery = Recovery(
            self._attachment,
            self._sender,
            timeout_seconds=timeout_seconds,
            lost_after_seconds=server_lost_after_seconds,
            pads_when_lost=pads_when_lost,
        )

    # What the lane shows.

    @property
    def state(self) -> ClientState:
        """Where the conversation is."""
        return self._attachment.state

    @property
    def error(self) -> EnvserveError | None:
        """Why the session is LOST."""
        return self._attachment.error

    @property
    def num_leases(self) -> int:
        """How many leases were granted."""
        return self._attachment.num_leases

    @property
    def spec(self) -> EnvSpec:
        """Spaces of the envs; raises LocalProtocolError before READY."""
        return self._granted.spec

    @property
    def rows(self) -> Rows:
        """Where actions are read from and results are written to."""
        return self._granted.rows

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks."""
        return self._granted.blocks

    @property
    def num_in_flight(self) -> int:
        """How many blocks have an operation that is not finished."""
        operations = self._attachment.operations
        return len(operations.busy) if operations else 0

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something."""
        operations = self._attachment.operations
        return operations is not None and operations.has_finished

    def take_finished(self) -> list[Outcome]:
        """Returns the operations that have ended since the last call."""
        operations = self._attachment.operations
        return operations.take_finished() if operations else []

    @property
    def is_recovering(self) -> bool:
        """Whether envs are lost, and no new lease is granted yet."""
        return self._recovery.is_under_way

    def stats(self) -> dict[str, int]:
        """Returns how often what has happened."""
        away = self._attachment.away
        return {
            "late_messages": self.late_messages,
            "resends": self._requests.num_resends,
            "reattaches": max(0, self.num_leases - 1),
            "padded": 0 if away is None else away.num_padded,
            "late_results": 0 if away is None else away.num_late,
            "unreachable_ms": int(1000 * self._silence.total_seconds),
        }

    @property
    def _granted(self) -> Operations:
        if self._attachment.operations is None:
            raise LocalProtocolError(f"{self._address}: the envs are not granted yet")
        return self._attachment.operations

    # What the caller wants.

    def settle(self) -> bool:
        """Mends what an interrupted call has left; tells whether anything is under way.

        Under way is also what has finished and was not taken.
        """
        return self._pairing.settle()

    def submit_step(
        self,
        blocks: Sequence[int],
        now: float,
        ticket: int = 0,
        is_alone: bool = False,
    ) -> None:
        """Asks for a step of these blocks with the actions in `rows.action`.

        Blocks that are away finish as padding, unless `is_alone`, until there is
        something to say of them: a late result, or that their episodes are lost.
        """
        operations, away = self._usable(now)
        if away:
            blocks = away.submit_step(blocks, now, ticket, is_alone)
            self._recovery.attend(now)
        if blocks:
            self._sender.request(operations.step(blocks, ticket, is_alone), now)

    def submit_reset(
        self, resets: Sequence[Reset], now: float, ticket: int = 0
    ) -> None:
        """Asks for resets, each of another block."""
        operations, away = self._usable(now)
        if away:
            resets = away.submit_reset(resets, ticket)
            self._recovery.attend(now)
        if resets:
            self._sender.request(operations.reset(resets, ticket), now)

    def submit_call(self, call: Call, now: float, ticket: int = 0) -> None:
        """Asks for attribute access.

        Raises:
          CallError: An argument is not a plain value.
        """
        operations, away = self._usable(now)
        if away and away.submit_call(call, ticket):
            self._recovery.attend(now)
        else:
            self._sender.request(operations.call(call, ticket), now)

    def begin_close(self, now: float) -> None:
        """Gives the envs back; the state is CLOSED when the server has them."""
        if self.state.is_over or self.state is ClientState.CLOSING:
            return
        self._recovery.loss = None
        self._attachment.give_back(now)

    # What the transport brings.

    def connected(self, now: float) -> None:
        """Notes that the transport can send, for the first time or anew."""
        self._silence.mend()
        if self.state is ClientState.CONNECTING:
            self._attachment.say_hello(now)
        elif len(self._requests):
            self._requests.resend_all(now)
            self._silence.expect_answer(now)
        elif self.state is ClientState.READY:
            self._sender.ping(now)  # it may be another server by now

    def disconnected(self, now: float) -> None:
        """Notes that it no longer can."""
        self._silence.break_off(now)

    def receive(self, frames: Sequence[Buffer], now: float) -> None:
        """Takes what the server has sent, whatever it is."""
        try:
            message = decode(frames)
        except RemoteProtocolError:
            self.late_messages += 1
            return
        handler = _HANDLERS.get(message.type)
        if (
            message.session != self._sender.session
            or handler is None
            or self.state.is_over
        ):
            self.late_messages += 1
            return
        self._silence.hear(now)
        self._has_warned = False
        if message.type is MessageType.WELCOME and (
            self.state is not ClientState.HELLO_SENT
        ):
            self.late_messages += 1  # before all: it may be of a server of the past
            return
        if self._sender.boot not in (0, message.boot):
            self._on_restart(now)
            return
        try:
            handler(self, message, now)
        except RemoteProtocolError as error:
            self._attachment.refuse(RemoteProtocolError(f"{self._address}: {error}"))
        self._recovery.attend(now)

    def advance(self, now: float) -> None:
        """Sends again what is due, pings, pads, and notices that the server is lost."""
        if self.state.is_over:
            return
        if self._attachment.operations is not None:
            self._silence.look(now)
        self._recovery.go_on(now)
        if self._requests.resend(now):
            self._silence.expect_answer(now)
        if self.state is ClientState.READY:
            if now >= self._silence.ping_at:
                self._sender.ping(now)
            if now >= self._unreachable_at:
                self._give_up_waiting(now)
            if now >= self._silence.unreachable_at and not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "%s: no answer, or no connection; it is asked again and again, for "
                    "as long as server_lost_after says",
                    self._address,
                )
        if now >= self._recovery.lost_at:
            self._recovery.give_up(now)
        self._recovery.attend(now)

    def next_deadline(self) -> float:
        """When `advance` has to be called next."""
        if self.state.is_over:
            return math.inf
        recovery, away = self._recovery, self._attachment.away
        deadline = min(
            self._requests.next_resend(), recovery.lost_at, recovery.go_on_at
        )
        if self.state is ClientState.READY:
            deadline = min(deadline, self._silence.ping_at, self._unreachable_at)
        if away:
            deadline = min(deadline, away.next_deadline())
        return deadline

    @property
    def _unreachable_at(self) -> float:
        """When steps in flight become overdue, if there are any that may."""
        at = self._silence.unreachable_at
        if at == math.inf or not any(p.can_be_padded for p in self._requests):
            return math.inf
        return at

    def _give_up_waiting(self, now: float) -> None:
        away = self._attachment.away
        for pending in self._requests:
            if away is not None and pending.can_be_padded:
                away.give_up_waiting(pending, now)

    def _usable(self, now: float) -> tuple[Operations, Away | None]:
        """Returns the operations, and what is away if anything is."""
        self._recovery.complete(now)
        state = self._attachment.state
        if state is ClientState.READY or (self.is_recovering and state.is_asking):
            return self._granted, self._attachment.away
        raise self.error or LocalProtocolError(
            f"{self._address}: expected a session that is READY; it is {state.name}"
        )

    # Answers.

    def _on_welcome(self, message: Message, now: float) -> None:
        self._attachment.welcome(message, now)

    def _on_building(self, message: Message, now: float) -> None:
        """Having heard of it is enough: the silence has been ended."""

    def _on_granted(self, message: Message, now: float) -> None:
        if self.state is not ClientState.ATTACHING:
            self._requests.remove(message.request)  # as an interrupt may leave it
            self.late_messages += 1
            return
        granted = self._attachment.check(message)
        self._recovery.note_granted()
        self._attachment.take(granted)

    def _on_result(self, message: Message, now: float) -> None:
        if self._pairing.take_result(message):
            self._recovery.loss = None  # the new lease serves
        else:
            self.late_messages += 1

    def _on_pong(self, message: Message, now: float) -> None:
        self._pairing.note_running(message, now)

    def _on_detached(self, message: Message, now: float) -> None:
        if self.state is ClientState.CLOSING:
            self._attachment.close()
        elif self.state is ClientState.READY:
            error = LeaseLost(f"{self._address}: the server says we have detached")
            self._recovery.begin(error, now)

    def _on_error(self, message: Message, now: float) -> None:
        body = ErrorBody.decode(message.body)
        pending = self._requests.get(message.request)
        is_ours = message.request == self._attachment.request or (
            pending is not None and pending.type in _ATTACHING_TYPES
        )
        ends_session = is_ours or body.code in _LOSSES
        if self.state is ClientState.CLOSING and (ends_session or pending is not None):
            self._attachment.close()
        elif ends_session:
            self._on_end_of_session(body, now)
        elif pending is not None:
            self._pairing.fail(pending, body)
        else:
            self.late_messages += 1

    def _on_end_of_session(self, body: ErrorBody, now: float) -> None:
        error = exception_of(body, self._address)
        if self._attachment.operations is not None and body.code in _LOSSES:
            self._recovery.begin(error, now)
        elif self.is_recovering and body.code in _BUSY:
            self._recovery.refused(body, now)
        else:
            self._attachment.refuse(error)

    def _on_drain(self, message: Message, now: float) -> None:
        _LOGGER.warning(
            "%s: the server is draining: it gives envs up once each of them has ended "
            "an episode, or in %g s, and stops",
            self._address,
            Drain.decode(message.body).grace_ms / 1000,
        )

    def _on_restart(self, now: float) -> None:
        """Handles a server that is another than the one we spoke to."""
        if self.state is ClientState.CLOSING:
            self._attachment.close()
        elif self._attachment.operations is None:  # nothing is lost yet
            self._sender.change_session()
            self._attachment.say_hello(now)
        else:
            self._recovery.begin(
                ServerLost(
                    f"{self._address}: the server was restarted, and its envs with it"
                ),
                now,
                is_restart=True,
            )

    def __repr__(self) -> str:
        return (
            f"<ClientSession {self._address} {self.state.name}, "
            f"{self.num_in_flight} in flight>"
        )


_HANDLERS: Final[
    Mapping[MessageType | int, Callable[[ClientSession, Message, float], None]]
] = {
    MessageType.WELCOME: ClientSession._on_welcome,
    MessageType.GRANTED: ClientSession._on_granted,
    MessageType.BUILDING: ClientSession._on_building,
    MessageType.RESULT: ClientSession._on_result,
    MessageType.CALL_RESULT: ClientSession._on_result,
    MessageType.PONG: ClientSession._on_pong,
    MessageType.DETACHED: ClientSession._on_detached,
    MessageType.DRAIN: ClientSession._on_drain,
    MessageType.ERROR: ClientSession._on_error,
}
