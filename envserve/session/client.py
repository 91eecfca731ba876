"""The client's half: attaches, sends operations, and pairs answers with them.

CONNECTING -> HELLO_SENT -> ATTACHING -> READY -> CLOSING -> CLOSED, or LOST from any.
An operation stays in flight until it is answered or the session is LOST, however long
its caller waits; so no result is ever taken for that of a later operation.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from envserve.blocks import Block, Call, Finished, Reset
from envserve.errors import (
    ConnectError,
    EnvserveError,
    LeaseLost,
    LocalProtocolError,
    ProtocolMismatch,
    RemoteProtocolError,
    ServerLost,
)
from envserve.session.operations import Draft, Operations
from envserve.session.requests import Outbox, Pending, Requests
from envserve.session.translation import exception_of
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Attach,
    Buffer,
    ErrorBody,
    ErrorCode,
    Granted,
    Hello,
    Message,
    MessageType,
    Pong,
    Welcome,
    decode,
    encode,
)

__all__ = ["ClientSession", "ClientState"]

_LOGGER: Final = logging.getLogger(__name__)
_PING_SECONDS: Final = 1.0
#: Request number of what is not sent again; requests count from 1.
_UNNUMBERED: Final = 0
_ATTACHING_TYPES: Final = (MessageType.HELLO, MessageType.ATTACH)


class ClientState(enum.Enum):
    """Where the conversation with the server is."""

    CONNECTING = enum.auto()  # no transport yet
    HELLO_SENT = enum.auto()
    ATTACHING = enum.auto()  # the server knows us, and builds envs
    READY = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()
    LOST = enum.auto()  # `error` says why

    @property
    def is_over(self) -> bool:
        """Whether nothing follows any more."""
        return self in (ClientState.CLOSED, ClientState.LOST)


class ClientSession:
    """One client's conversation with one server.

    The shell passes on what it receives, calls `advance` at `next_deadline`, and sends
    what is in `outbox`.

    Attributes:
      state: See `ClientState`.
      error: Why the session is LOST.
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
        client: str = "",
    ) -> None:
        """Starts CONNECTING.

        Args:
          address: The server's, for messages.
          attach: Which envs to ask for.
          session: Random number in [1, 2**64).
          now: Monotonic seconds, as everywhere below.
          timeout_seconds: Longest silence before the envs are granted.
          server_lost_after_seconds: Longest silence after that.
          client: Who we are, for the server's log.
        """
        self.state = ClientState.CONNECTING
        self.error: EnvserveError | None = None
        self.outbox = Outbox()
        self.late_messages = 0
        self._address = address
        self._attach = attach
        self._session = session
        self._timeout = timeout_seconds
        self._lost_after = server_lost_after_seconds
        self._client = client
        self._boot = 0
        self._epoch = 0
        self._max_message_bytes = 0
        self._attach_request = 0
        self._next_request = 1
        self._requests = Requests(self.outbox)
        self._silent_since: float | None = now  # since what we sent is unanswered
        self._ping_at = math.inf
        self._operations: Operations | None = None

    # What the lane shows.

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
        return len(self._operations.busy) if self._operations else 0

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something."""
        return self._operations is not None and self._operations.has_finished

    def take_finished(self) -> list[Finished]:
        """Returns the operations that have ended since the last call."""
        return self._operations.take_finished() if self._operations else []

    @property
    def _granted(self) -> Operations:
        if self._operations is None:
            raise LocalProtocolError(f"{self._address}: the envs are not granted yet")
        return self._operations

    # What the caller wants.

    def settle(self) -> bool:
        """Mends what an interrupted call has left; tells whether anything is under way.

        Under way is also what has finished and was not taken.
        """
        if self._operations is None:
            return False
        for pending in [p for p in self._requests if p.entries]:
            if self._operations.has_ended(pending):  # else it is sent again for ever
                self._requests.remove(pending.id)
        if self._operations.busy:
            self._operations.settle(self._requests)
        return bool(self._operations.busy) or self.has_finished

    def submit_step(self, blocks: Sequence[int], now: float, ticket: int = 0) -> None:
        """Asks for a step of these blocks with the actions in `rows.action`."""
        if blocks:
            self._request(self._ready.step(blocks, ticket), now)

    def submit_reset(
        self, resets: Sequence[Reset], now: float, ticket: int = 0
    ) -> None:
        """Asks for resets, each of another block."""
        if resets:
            self._request(self._ready.reset(resets, ticket), now)

    def submit_call(self, call: Call, now: float, ticket: int = 0) -> None:
        """Asks for attribute access.

        Raises:
          CallError: An argument is not a plain value.
        """
        self._request(self._ready.call(call, ticket), now)

    def begin_close(self, now: float) -> None:
        """Gives the envs back; the state is CLOSED when the server has them."""
        if self.state.is_over or self.state is ClientState.CLOSING:
            return
        was_attached = self.state in (ClientState.ATTACHING, ClientState.READY)
        self._requests.clear()
        if self._operations is not None:
            self._operations.abandon()
        self.state = ClientState.CLOSING if was_attached else ClientState.CLOSED
        if was_attached:
            self._request(Draft(type=MessageType.DETACH, entries=()), now)

    # What the transport brings.

    def connected(self, now: float) -> None:
        """Notes that the transport can send."""
        if self.state is ClientState.CONNECTING:
            self._say_hello(now)

    def receive(self, frames: Sequence[Buffer], now: float) -> None:
        """Takes what the server has sent, whatever it is."""
        try:
            message = decode(frames)
        except RemoteProtocolError:
            self.late_messages += 1
            return
        handler = _HANDLERS.get(message.type)
        if message.session != self._session or handler is None or self.state.is_over:
            self.late_messages += 1
            return
        self._silent_since = None
        self._ping_at = now + _PING_SECONDS
        if self._boot not in (0, message.boot):
            self._on_restart(now)
            return
        try:
            handler(self, message, now)
        except RemoteProtocolError as error:
            self._lose(RemoteProtocolError(f"{self._address}: {error}"))

    def advance(self, now: float) -> None:
        """Sends again what is due, pings, and notices that the server is lost."""
        if self.state.is_over:
            return
        if self._requests.resend(now):
            self._expect_answer(now)
        if self.state is ClientState.READY and now >= self._ping_at:
            self._send_once(MessageType.PING)
            self._ping_at = now + _PING_SECONDS
            self._expect_answer(now)
        if self._silent_since is None or now < self._silent_since + self._patience:
            return
        silence = now - self._silent_since
        if self.state in (ClientState.READY, ClientState.CLOSING):
            error: EnvserveError = ServerLost(
                f"{self._address}: no answer for {silence:.0f} s, so its envs are "
                f"taken for lost; look at the server's log, or raise "
                f"server_lost_after_seconds"
            )
        else:
            error = ConnectError(
                f"{self._address}: no server answered within {self._timeout:g} s; is "
                f"`envserve start --bind {self._address}` running there, and can it "
                f"be reached?"
            )
        self._lose(error)

    def next_deadline(self) -> float:
        """When `advance` has to be called next."""
        if self.state.is_over:
            return math.inf
        deadline = self._requests.next_resend()
        if self.state is ClientState.READY:
            deadline = min(deadline, self._ping_at)
        if self._silent_since is not None:
            deadline = min(deadline, self._silent_since + self._patience)
        return deadline

    @property
    def _patience(self) -> float:
        is_attached = self.state in (ClientState.READY, ClientState.CLOSING)
        return self._lost_after if is_attached else self._timeout

    # Sending.

    @property
    def _ready(self) -> Operations:
        if self.state is ClientState.READY:
            return self._granted
        raise self.error or LocalProtocolError(
            f"{self._address}: expected a session that is READY; it is "
            f"{self.state.name}"
        )

    def _request(self, draft: Draft, now: float) -> int:
        request = self._next_request
        self._next_request += 1
        message = Message(
            type=draft.type,
            session=self._session,
            boot=self._boot,
            epoch=self._epoch,
            request=request,
            entries=draft.entries,
            body=draft.body,
            payload=draft.payload,
        )
        self._requests.add(message, now, draft.part, draft.ticket)
        self._expect_answer(now)
        return request

    def _send_once(self, type_: MessageType) -> None:
        """Sends what needs no answer, or what the next one will replace."""
        message = Message(
            type=type_,
            session=self._session,
            boot=self._boot,
            epoch=self._epoch,
            request=_UNNUMBERED,
        )
        self.outbox.put(_UNNUMBERED, encode(message))

    def _expect_answer(self, now: float) -> None:
        if self._silent_since is None:
            self._silent_since = now

    def _say_hello(self, now: float) -> None:
        self._requests.clear()
        self._boot = 0
        self.state = ClientState.HELLO_SENT
        body = Hello(client=self._client).encode()
        self._request(Draft(type=MessageType.HELLO, entries=(), body=body), now)

    # Answers.

    def _on_welcome(self, message: Message, now: float) -> None:
        if self.state is not ClientState.HELLO_SENT:
            self.late_messages += 1
            return
        welcome = Welcome.decode(message.body)
        if welcome.min_version > VERSION or welcome.max_version < MIN_VERSION:
            self._lose(
                ProtocolMismatch(
                    f"{self._address}: the server speaks protocol versions "
                    f"{welcome.min_version} to {welcome.max_version}, this client "
                    f"{MIN_VERSION} to {VERSION}; install the same release"
                )
            )
            return
        self._requests.clear()
        self._boot = message.boot
        self._max_message_bytes = welcome.max_message_bytes
        self.state = ClientState.ATTACHING
        draft = Draft(type=MessageType.ATTACH, entries=(), body=self._attach.encode())
        self._attach_request = self._request(draft, now)

    def _on_building(self, message: Message, now: float) -> None:
        """Having heard of it is enough: the silence has been ended."""

    def _on_granted(self, message: Message, now: float) -> None:
        if self.state is not ClientState.ATTACHING:
            self.late_messages += 1
            return
        granted = Granted.decode(message.body, self._attach.num_envs)
        self._check_message_size(granted.spec)
        if self._attach.spare_envs and not granted.spare_envs:
            raise RemoteProtocolError(
                "expected envs with spares; got envs without from a server that does "
                "not know them; update the server, or leave out spare_envs"
            )
        self._requests.clear()
        self._epoch = granted.epoch
        self._operations = Operations(self._address, granted.spec, granted.blocks)
        self.state = ClientState.READY

    def _check_message_size(self, spec: EnvSpec) -> None:
        needed = self._attach.num_envs * sum(leaf.nbytes for leaf in spec.action_leaves)
        if needed > self._max_message_bytes:
            raise RemoteProtocolError(
                f"actions of {self._attach.num_envs} envs need {needed} bytes, and the "
                f"server accepts {self._max_message_bytes} at once; start it with a "
                f"larger --max-message-mib"
            )

    def _on_result(self, message: Message, now: float) -> None:
        pending = self._requests.get(message.request)
        if pending is None or not self._is_answer(message, pending):
            self.late_messages += 1
            return
        self._granted.finish(pending, message)
        self._requests.remove(pending.id)

    def _is_answer(self, message: Message, pending: Pending) -> bool:
        expected = (
            MessageType.CALL_RESULT
            if pending.type is MessageType.CALL
            else MessageType.RESULT
        )
        return (
            message.type is expected
            and message.entries == pending.entries
            and message.epoch == self._epoch
        )

    def _on_pong(self, message: Message, now: float) -> None:
        running = Pong.decode(message.body).running
        for pending in self._requests:
            if any(block in running for block, _ in pending.entries):
                self._requests.postpone(pending, now)

    def _on_detached(self, message: Message, now: float) -> None:
        if self.state is ClientState.CLOSING:
            self._close()
        elif self.state is ClientState.READY:
            self._lose(LeaseLost(f"{self._address}: the server says we have detached"))

    def _on_error(self, message: Message, now: float) -> None:
        body = ErrorBody.decode(message.body)
        pending = self._requests.get(message.request)
        is_ours = message.request == self._attach_request or (
            pending is not None and pending.type in _ATTACHING_TYPES
        )
        ends_session = is_ours or body.code in (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
        if self.state is ClientState.CLOSING and (ends_session or pending is not None):
            self._close()
        elif ends_session:
            self._lose(exception_of(body, self._address))
            self._send_once(MessageType.DETACH)  # so that the server knows we know
        elif pending is not None:
            self._requests.remove(pending.id)
            self._granted.fail(pending, body)
        else:
            self.late_messages += 1

    def _on_drain(self, message: Message, now: float) -> None:
        _LOGGER.info("%s: the server is about to stop", self._address)

    def _on_restart(self, now: float) -> None:
        """Handles a server that is another than the one we spoke to."""
        if self.state is ClientState.ATTACHING:  # nothing is lost yet
            self._say_hello(now)
        elif self.state is ClientState.CLOSING:
            self._close()
        else:
            self._lose(
                ServerLost(
                    f"{self._address}: the server was restarted, and its envs with it"
                )
            )

    def _close(self) -> None:
        self._requests.clear()
        self.state = ClientState.CLOSED

    def _lose(self, error: EnvserveError) -> None:
        self.state = ClientState.LOST
        self.error = error
        self._requests.clear()
        if self._operations is not None:
            self._operations.lose(error)

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
