"""Numbers a client's requests, and resends them until they are answered.

An operation is resent after 1 s, then after 2 s, then every 4 s, and immediately after
a reconnect. Other requests are resent every second: each copy of an ATTACH renews the
session while the envs are built. Copies differ only in their attempt number. The outbox
contains each request at most once, so its size is bounded. Messages that expect no
reply are sent once.

A PING follows each copy. If the PONG lists no block of the request as running, the
server has ignored the copy; see the decision "A PONG shows which requests a server
ignores".
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from envserve.errors import CallError
from envserve.lane import Call, Reset
from envserve.session.client.liveness import PING_SECONDS, Liveness, Timeouts
from envserve.spaces import codec
from envserve.wire.bodies import CallBody
from envserve.wire.constants import MAX_ARGUMENT_BLOCKS, MAX_ARGUMENT_BYTES, MessageType
from envserve.wire.message import (
    Buffer,
    Message,
    pack,
    request_number,
    result_head,
    set_attempt,
)
from envserve.wire.rows import RowPart

#: Seconds before a request is resent for the first time, and maximum seconds before an
#: operation is resent again.
_FIRST_RESEND_SECONDS: Final = 1.0
_MAX_RESEND_SECONDS: Final = 4.0
#: Number of consecutive times that the server must ignore a request before the blocks
#: of the request count as absent, and before the server can count as lost.
_MIN_IGNORED_ABSENT: Final = 2
_MIN_IGNORED_LOST: Final = 3
#: Minimum time, in seconds, that a server must ignore a request before the server is
#: considered lost. This is longer than it takes to send the request `_MIN_IGNORED_LOST`
#: times, so that the client can find another server in the meantime.
_MIN_IGNORED_SECONDS: Final = 8.0
#: Types of operations, and of the replies to them.
_REPLIES: Final[Mapping[MessageType, MessageType]] = {
    MessageType.STEP: MessageType.RESULT,
    MessageType.RESET: MessageType.RESULT,
    MessageType.CALL: MessageType.CALL_RESULT,
}
#: Outbox keys of a PING and a DETACH, which are not resent.
_PING_KEY: Final = 0
_DETACH_KEY: Final = -1
#: Difference between consecutive session numbers. Because it is odd, all 2**64 numbers
#: occur before one repeats.
_INCREMENT: Final = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Request:
    """A request to the server, until it is answered.

    Attributes:
      type: STEP, RESET or CALL; or HELLO, ATTACH or DETACH, which have no entries.
      entries: Block index and seq of each block of the request.
      body: Body of the message.
      payload: Payload frame of a STEP: the action rows that the body does not contain.
      part: Rows that the reply will be written to; None for a CALL, for example.
      resets: Resets of a RESET, one for each block.
      is_step: Whether the caller requested a step; for a lost block, a RESET is sent
        instead of a STEP.
      id: Request id; 0 until it is sent.
      answered_blocks: Indices of the blocks that were answered separately.
      frames: Frames of the original or, once it was resent, of the latest copy.
      reply_head: First bytes of the usual reply to a STEP, up to its body; see
        `Requests.step_answered_by`.
      attempt: Number of times that the request was resent.
      resend_at: Time at which the next copy is sent, in monotonic seconds.
      resend_delay: Seconds from the latest frames to the next copy.
      sent_at: Time at which the original was sent.
      ignored_at: For each consecutive time that the server has ignored the request, the
        time of the PONG that showed it.
      pong_after: A PONG with a number above this one shows whether the latest frames
        were ignored; infinity if a PONG has already shown it.
    """

    type: MessageType
    entries: tuple[tuple[int, int], ...] = ()
    body: bytes = b""
    payload: Buffer = b""
    part: RowPart | None = None
    resets: tuple[Reset, ...] = ()
    is_step: bool = False
    id: int = 0
    answered_blocks: set[int] = field(default_factory=set)
    frames: list[Buffer] = field(default_factory=list)
    reply_head: bytes = b""
    attempt: int = 0
    resend_at: float = math.inf
    resend_delay: float = _FIRST_RESEND_SECONDS
    sent_at: float = math.inf
    ignored_at: tuple[float, ...] = ()
    pong_after: float = math.inf

    @property
    def is_ignored(self) -> bool:
        """Whether the request's blocks are absent, because the server ignores it."""
        return len(self.ignored_at) >= _MIN_IGNORED_ABSENT

    @property
    def unanswered_blocks(self) -> list[int]:
        """Indices of blocks that have no reply yet; empty for a HELLO, for example."""
        answered = self.answered_blocks
        return [block for block, _ in self.entries if block not in answered]

    def describe_stall(self, now: float) -> str:
        """Return a description of a request that the server does not reply to."""
        operation = f"{self.type.name} of block {self.unanswered_blocks[0]}"
        seconds = now - self.sent_at
        if not self.ignored_at:
            return f"the server has not finished {operation} within {seconds:.0f} s"
        attempts = f"{self.attempt + 1} attempts in {seconds:.0f} s"
        return f"the server replies, but ignores {operation}: {attempts}"


class Requests:
    """Numbers requests, and keeps them until they are answered.

    Attributes:
      session: Number of the session.
      boot: Boot id of the server; 0 until its WELCOME arrives.
      epoch: Number of the lease; 0 until it is granted.
      outbox: Frames to send, by request id (with other keys for a PING and a DETACH),
        in sending order; the transport deletes entries that it has sent.
      unanswered: Requests without a complete reply, by id.
      liveness: Liveness of the server.
      num_resends: Number of copies sent.
    """

    def __init__(self, session: int, now: float) -> None:
        """Start without requests; for `session` see `ClientSession`."""
        self.session = session
        self.boot = 0
        self.epoch = 0
        self.outbox: dict[int, list[Buffer]] = {}
        self.unanswered: dict[int, Request] = {}
        self.liveness = Liveness(now)
        self.num_resends = 0
        self._last_id = 0

    def send(self, request: Request, now: float) -> None:
        """Put a request into the outbox, once, under a new request id."""
        self._last_id += 1
        number = request.id = request.pong_after = self._last_id
        numbers = (self.session, self.boot, self.epoch)
        kind, entries, payload = request.type, request.entries, request.payload
        request.frames = pack(kind, numbers, number, entries, request.body, payload)
        if kind is MessageType.STEP and request.part is not None:
            size = request.part.num_result_bytes
            request.reply_head = result_head(request.frames[0], len(entries), size)
        request.sent_at, request.resend_at = now, now + request.resend_delay
        self.unanswered[number] = request
        self.outbox[number] = request.frames
        # `expect_reply` is inlined here, because this method runs at every step.
        if self.liveness.silent_since == math.inf:
            self.liveness.silent_since = now

    def step_answered_by(self, frames: Sequence[Buffer]) -> Request | None:
        """Return the STEP that these frames reply to in the usual way, or None.

        The usual reply is a single frame, without a report, that covers all blocks of
        the request and ends no episode. Comparing its beginning with the expected bytes
        is much cheaper than decoding the message.
        """
        if len(frames) != 1:
            return None
        head = frames[0]
        request = self.unanswered.get(request_number(head))
        if (
            request is None
            or request.part is None
            or request.answered_blocks
            or not (expected := request.reply_head)
            or head[: len(expected)] != expected
            or len(head) != len(expected) + request.part.num_result_bytes
        ):
            return None
        return request

    def answered_by(self, message: Message) -> Request | None:
        """Return the request that a RESULT or CALL_RESULT replies to, or None.

        The message replies to the whole request, or to a single block that was not
        answered yet.
        """
        request = self.unanswered.get(message.request)
        if (
            request is None
            or message.type is not _REPLIES.get(request.type)
            or message.epoch != self.epoch
        ):
            return None
        entries = message.entries
        answered = request.answered_blocks
        is_whole = entries == request.entries and not answered
        is_part = len(entries) == 1 and entries[0] in request.entries
        is_new_part = is_part and entries[0][0] not in answered
        return request if is_whole or is_new_part else None

    def record_reply(self, request: Request, message: Message) -> None:
        """Record that a request, or one of its blocks, was answered."""
        if message.entries != request.entries:
            request.answered_blocks.add(message.entries[0][0])
            if len(request.answered_blocks) < len(request.entries):
                return
        self.remove(request.id)

    def remove(self, request: int) -> None:
        """Remove a request that was answered."""
        self.unanswered.pop(request, None)
        self.outbox.pop(request, None)

    def clear(self) -> None:
        """Remove all requests, and all frames to send."""
        self.unanswered.clear()
        self.outbox.clear()

    def resend_due(self, now: float) -> bool:
        """Resend requests whose `resend_at` has passed; return whether any was due."""
        previous = self.num_resends
        for request in self.unanswered.values():
            if now >= request.resend_at:
                if request.entries:  # an operation
                    longer = 2 * request.resend_delay
                    request.resend_delay = min(longer, _MAX_RESEND_SECONDS)
                self._send_again(request, now)
                self.liveness.expect_reply(now)
        return self.num_resends > previous

    def resend_all(self, now: float) -> None:
        """Resend all requests, because the last connection may have lost them."""
        for request in self.unanswered.values():
            request.ignored_at = ()
            if request.id not in self.outbox:
                request.resend_delay = _FIRST_RESEND_SECONDS
                self._send_again(request, now)
        self.liveness.expect_reply(now)

    def _send_again(self, request: Request, now: float) -> None:
        request.attempt += 1
        head, *others = request.frames
        request.frames = [set_attempt(head, request.attempt), *others]
        request.resend_at = now + request.resend_delay
        request.pong_after = self._last_id
        self.num_resends += 1
        self.outbox[request.id] = request.frames

    def record_pong(
        self, number: int, running: Container[int], now: float
    ) -> list[Request]:
        """Record which requests the server executes, and which ones it ignores.

        A PONG has the number of its PING, and lists the indices of the running blocks.
        Return the requests whose blocks have become absent, or are no longer absent.
        """
        changed = []
        for request in self.unanswered.values():
            blocks, was_ignored = request.unanswered_blocks, request.is_ignored
            is_running = [block in running for block in blocks]
            if any(is_running):
                request.ignored_at = ()
                # The results of blocks that are not running may have been lost.
                if all(is_running):
                    request.resend_at = now + request.resend_delay
            elif blocks and number > request.pong_after:
                request.ignored_at += (now,)
                request.pong_after = math.inf
            if was_ignored != request.is_ignored:
                changed.append(request)
        return changed

    def record_running(self, request: Request, now: float) -> None:
        """Postpone the next copy of a request, because the server executes it."""
        request.resend_at = now + request.resend_delay
        request.ignored_at = ()

    def exclude_suspension(self, seconds: float) -> None:
        """Subtract a suspension of this client, in seconds, from the requests' ages."""
        for request in self.unanswered.values():
            request.sent_at += seconds
            request.ignored_at = ()

    def stalled(self, timeouts: Timeouts) -> tuple[float, Request | None]:
        """Return the next time at which a request exceeds a limit, and this request.

        Without such a request, the time is infinity and the request None.
        """
        first_at, first = math.inf, None
        ignored_seconds = max(timeouts.lost_seconds, _MIN_IGNORED_SECONDS)
        for request in self.unanswered.values():
            deadline = request.sent_at + timeouts.operation_seconds
            if len(request.ignored_at) >= _MIN_IGNORED_LOST:
                deadline = min(deadline, request.ignored_at[0] + ignored_seconds)
            if deadline < first_at:
                first_at, first = deadline, request
        return first_at, first

    def next_resend(self) -> float:
        """Return the time at which to call `resend_due`; infinity if never."""
        return min((r.resend_at for r in self.unanswered.values()), default=math.inf)

    def ping(self, now: float) -> None:
        """Send a PING, to which the server replies with a PONG of the same number."""
        self._last_id += 1
        self.outbox.pop(_PING_KEY, None)  # the new PING must follow the other frames
        self.outbox[_PING_KEY] = self.pack(MessageType.PING, self._last_id)
        self.liveness.ping_at = now + PING_SECONDS
        self.liveness.expect_reply(now)

    def pack(self, type_: MessageType, request: int = 0) -> list[Buffer]:
        """Return the frames of a message of the current lease, without a body."""
        return pack(type_, (self.session, self.boot, self.epoch), request)

    def send_detach(self, frames: list[Buffer]) -> None:
        """Send the DETACH of a former lease once; do nothing if `frames` is empty."""
        if frames:
            self.outbox[_DETACH_KEY] = frames

    def change_session(self) -> None:
        """Change the session number, so that replies to older requests do not match."""
        self.clear()
        # The boot id comes first, because an interrupt may end this method.
        self.boot = self.epoch = 0
        self.session = (self.session + _INCREMENT) & 0xFFFFFFFFFFFFFFFF or _INCREMENT

    def adopt_session(self, other: Requests) -> None:
        """Continue another object's session; that object must not send any more."""
        self.clear()
        self.session, self.boot, self.epoch = other.session, other.boot, other.epoch
        self._last_id = max(self._last_id, other._last_id)


def pack_calls(
    calls: Sequence[Call], address: str
) -> list[tuple[Sequence[Call], bytes]]:
    """Pack calls into as few CALL bodies as the size limits allow.

    Returns:
      For each CALL, its calls and its body.

    Raises:
      CallError: The arguments of one call exceed the limit of a message.
    """
    longest = max(len(call.arguments) for call in calls)
    size = min(MAX_ARGUMENT_BLOCKS, MAX_ARGUMENT_BYTES // max(longest, 1)) or 1
    chunks = [calls[start : start + size] for start in range(0, len(calls), size)]
    try:
        return [(chunk, CallBody.from_calls(chunk).encode()) for chunk in chunks]
    except codec.CodecError as error:
        if len(calls) > 1:
            return [pair for call in calls for pair in pack_calls([call], address)]
        row = calls[0].env_indices[0]
        raise CallError(f"{address}: {calls[0].name}: {error}", env_index=row) from None
