"""A client's requests: numbers them, sends them, and sends them again until answered.

A request is sent again after 1 s, then 2 s, then every 4 s, and at once after a
reconnect; only its attempt number changes. At most one copy of it waits to be sent, so
the outbox is bounded. Messages that need no answer are sent once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from envserve.errors import CallError
from envserve.lane import Call, Reset
from envserve.session.client.liveness import Liveness
from envserve.spaces import codec
from envserve.wire.bodies import CallBody
from envserve.wire.constants import MAX_ARGUMENT_BLOCKS, MAX_ARGUMENT_BYTES, MessageType
from envserve.wire.message import Buffer, Message, pack, set_attempt
from envserve.wire.rows import RowPart

_FIRST_RESEND_SECONDS: Final = 1.0
_MAX_RESEND_SECONDS: Final = 4.0
_ANSWERS: Final[Mapping[MessageType, MessageType]] = {
    MessageType.STEP: MessageType.RESULT,
    MessageType.RESET: MessageType.RESULT,
    MessageType.CALL: MessageType.CALL_RESULT,
}
#: Places in the outbox of what has no request number.
_PING_PLACE: Final = 0
_FAREWELL_PLACE: Final = -1
#: An odd number: all session numbers differ before they repeat.
_STRIDE: Final = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Request:
    """Something asked of the server, from its drafting to its answer.

    Attributes:
      type: STEP, RESET or CALL; or HELLO, ATTACH or DETACH, which have no entries.
      entries: The blocks that it is about, each with its seq.
      body: What it says.
      payload: More rows.
      part: Where rows of the answer go.
      resets: Of a RESET, per block.
      is_step: Whether its caller waits for a step; of a block that is lost, the server
        is sent a RESET.
      id: Its number; 0 until it is sent.
      answered: Blocks that were answered on their own.
      frames: What was sent.
      attempt: How often it was sent before.
      resend_at: When to send it again.
      delay: How long to wait for an answer then.
    """

    type: MessageType
    entries: tuple[tuple[int, int], ...] = ()
    body: bytes = b""
    payload: Buffer = b""
    part: RowPart | None = None
    resets: tuple[Reset, ...] = ()
    is_step: bool = False
    id: int = 0
    answered: set[int] = field(default_factory=set)
    frames: list[Buffer] = field(default_factory=list)
    attempt: int = 0
    resend_at: float = math.inf
    delay: float = _FIRST_RESEND_SECONDS


class Requests:
    """Numbers what is sent, and keeps it until it is answered.

    Attributes:
      session: Number of the session.
      boot: Number of the server's start; 0 until it has said WELCOME.
      epoch: Number of the lease; 0 until it is granted.
      outbox: Frames to send, by request, in their order; who has sent some deletes
        them.
      waiting: What has no answer yet, by number.
      silence: Since when an answer is missing.
      num_resends: How many copies were sent.
    """

    def __init__(self, session: int, now: float) -> None:
        """Starts with nothing to send; `session` as for `ClientSession`."""
        self.session = session
        self.boot = 0
        self.epoch = 0
        self.outbox: dict[int, list[Buffer]] = {}
        self.waiting: dict[int, Request] = {}
        self.liveness = Liveness(now)
        self.num_resends = 0
        self._last_id = 0

    def send(self, request: Request, now: float) -> None:
        """Sends a request for the first time, or anew under another number."""
        self._last_id += 1
        number = request.id = self._last_id
        numbers = (self.session, self.boot, self.epoch)
        kind, entries, payload = request.type, request.entries, request.payload
        request.frames = pack(kind, numbers, number, entries, request.body, payload)
        request.attempt = 0
        request.resend_at = now + _FIRST_RESEND_SECONDS
        request.delay = _FIRST_RESEND_SECONDS
        self.waiting[number] = request
        self.outbox[number] = request.frames
        if self.liveness.silent_since == math.inf:  # in line: it is done at every step
            self.liveness.silent_since = now

    def answered_by(self, message: Message) -> Request | None:
        """Returns the request that a RESULT or CALL_RESULT answers, if one waits.

        As a whole, or, of several blocks, one that was not answered yet.
        """
        request = self.waiting.get(message.request)
        if (
            request is None
            or message.type is not _ANSWERS.get(request.type)
            or message.epoch != self.epoch
        ):
            return None
        entries = message.entries
        if entries == request.entries and not request.answered:
            return request
        is_part = len(entries) == 1 and entries[0] in request.entries
        if is_part and entries[0][0] not in request.answered:
            return request
        return None

    def note_answer(self, request: Request, message: Message) -> None:
        """Forgets a request, or notes which of its blocks was answered."""
        if message.entries != request.entries:
            request.answered.add(message.entries[0][0])
            if len(request.answered) < len(request.entries):
                return
        self.remove(request.id)

    def remove(self, request: int) -> None:
        """Forgets a request, now answered."""
        self.waiting.pop(request, None)
        self.outbox.pop(request, None)

    def clear(self) -> None:
        """Forgets all requests, and what waits to be sent."""
        self.waiting.clear()
        self.outbox.clear()

    def resend_due(self, now: float) -> None:
        """Sends again what has waited for long enough."""
        for request in self.waiting.values():
            if now >= request.resend_at:
                request.delay = min(2 * request.delay, _MAX_RESEND_SECONDS)
                self._send_again(request, now)
                self.liveness.expect_answer(now)

    def resend_all(self, now: float) -> None:
        """Sends again what the last connection may have swallowed: everything sent."""
        for request in self.waiting.values():
            if request.id not in self.outbox:
                request.delay = _FIRST_RESEND_SECONDS
                self._send_again(request, now)
        self.liveness.expect_answer(now)

    def _send_again(self, request: Request, now: float) -> None:
        request.attempt += 1
        head, *rest = request.frames
        request.frames = [set_attempt(head, request.attempt), *rest]
        request.resend_at = now + request.delay
        self.num_resends += 1
        self.outbox[request.id] = request.frames

    def postpone_running(self, running: Container[int], now: float) -> None:
        """Puts off resends, since the server is at work at these blocks."""
        for request in self.waiting.values():
            for block, _ in request.entries:
                if block in running and block not in request.answered:
                    request.resend_at = now + request.delay

    def next_resend(self) -> float:
        """When `resend_due` has to be called next."""
        return min((r.resend_at for r in self.waiting.values()), default=math.inf)

    def ping(self, now: float) -> None:
        """Asks for a sign of life."""
        self.outbox[_PING_PLACE] = self.pack(MessageType.PING)
        self.liveness.note_ping(now)

    def pack(self, type_: MessageType) -> list[Buffer]:
        """Packs a message without number and content, of the present lease."""
        return pack(type_, (self.session, self.boot, self.epoch), 0)

    def say_farewell(self, farewell: list[Buffer]) -> None:
        """Sends once that a lease is not needed any more."""
        if farewell:
            self.outbox[_FAREWELL_PLACE] = farewell

    def change_session(self) -> None:
        """Begins another session: answers to this one are strange from now on."""
        self.clear()
        self.session = (self.session + _STRIDE) & 0xFFFFFFFFFFFFFFFF or _STRIDE
        self.boot = self.epoch = 0


def pack_calls(
    calls: Sequence[Call], address: str
) -> list[tuple[Sequence[Call], bytes]]:
    """Returns the bodies of CALLs, as few as can be, each with what it asks for.

    Raises:
      CallError: Arguments are too long for a message.
    """
    longest = max(len(call.arguments) for call in calls)
    size = min(MAX_ARGUMENT_BLOCKS, MAX_ARGUMENT_BYTES // max(longest, 1)) or 1
    chunks = [calls[at : at + size] for at in range(0, len(calls), size)]
    try:
        return [(chunk, CallBody.from_calls(chunk).encode()) for chunk in chunks]
    except codec.CodecError as error:
        if len(calls) > 1:
            return [pair for call in calls for pair in pack_calls([call], address)]
        row = calls[0].env_indices[0]
        raise CallError(
            f"{address}: Env {row}: {calls[0].name}: {error}", env_index=row
        ) from None
