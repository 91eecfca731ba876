"""A client's requests: what waits for an answer, and what waits to be sent.

A request is sent again, byte for byte but for its attempt, after 1 s, then 2 s, then
every 4 s, and at once when a connection is made anew. At most one copy of it waits to
be sent, so the outbox is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from envserve.lane import Outcome, Reset
from envserve.wire import (
    Buffer,
    Message,
    MessageType,
    RowPart,
    encode,
    set_attempt,
)

__all__ = ["Asked", "Draft", "Outbox", "Pending", "Requests"]

_FIRST_RESEND_SECONDS: Final = 1.0
_MAX_RESEND_SECONDS: Final = 4.0


class Outbox:
    """Frames that wait until the transport takes them, by request."""

    def __init__(self) -> None:
        """Starts empty."""
        self._frames: dict[int, list[Buffer]] = {}

    def put(self, request: int, frames: list[Buffer]) -> None:
        """Adds frames, or replaces an unsent copy of the same request."""
        self._frames[request] = frames

    def first(self) -> list[Buffer] | None:
        """Returns the frames to send next."""
        return next(iter(self._frames.values()), None)

    def pop(self) -> None:
        """Forgets the first, which has been sent."""
        del self._frames[next(iter(self._frames))]

    def discard(self, request: int) -> None:
        """Forgets a request that needs no sending any more."""
        self._frames.pop(request, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._frames.clear()

    def __contains__(self, request: int) -> bool:
        return request in self._frames

    def __len__(self) -> int:
        return len(self._frames)


@dataclass(slots=True)
class Asked:
    """A request that no caller waits for: an overdue step, or a reset of our own.

    Attributes:
      id: Number of the request.
      is_recovery: Whether it resets envs of a new lease.
      outcomes: What has come of it, by block; None until then. Of a block for which
        nothing has happened, there is None.
    """

    id: int
    is_recovery: bool
    outcomes: Mapping[int, Outcome | None] | None = None


@dataclass(slots=True, kw_only=True)
class Draft:
    """A request that is about to be sent; see `Pending`."""

    type: MessageType
    entries: tuple[tuple[int, int], ...]
    flags: int = 0
    part: RowPart | None = None
    body: bytes = b""
    payload: Buffer = b""
    ticket: int = 0
    resets: tuple[Reset, ...] = ()
    is_alone: bool = False
    asked: Asked | None = None


@dataclass(slots=True)
class Pending:
    """A request that has not been answered.

    Attributes:
      id: Its number.
      type: What it asks for.
      entries: Blocks and seqs.
      part: Where rows of the answer go.
      ticket: What its caller knows it by.
      frames: What is sent.
      resend_at: When to send it again.
      resets: Of a RESET, per entry.
      is_alone: Of a STEP, whether its caller waits for as long as it takes.
      asked: Set when no caller waits for it.
      delay: How long to wait for an answer.
      attempt: How often it was sent before.
    """

    id: int
    type: MessageType | int
    entries: tuple[tuple[int, int], ...]
    part: RowPart | None
    ticket: int
    frames: list[Buffer]
    resend_at: float
    resets: tuple[Reset, ...] = ()
    is_alone: bool = False
    asked: Asked | None = None
    delay: float = _FIRST_RESEND_SECONDS
    attempt: int = 0

    @property
    def can_be_padded(self) -> bool:
        """Whether its caller goes on without its answer if that takes too long."""
        is_step = self.type is MessageType.STEP
        return is_step and not self.is_alone and self.asked is None


class Requests:
    """Requests in flight, with their resends.

    Attributes:
      num_resends: How often a request was sent again.
    """

    def __init__(self, outbox: Outbox) -> None:
        """Takes where to put what is to be sent."""
        self.num_resends = 0
        self._outbox = outbox
        self._pending: dict[int, Pending] = {}

    def add(self, message: Message, draft: Draft, now: float) -> None:
        """Sends a request for the first time."""
        frames = encode(message)
        self._pending[message.request] = Pending(
            message.request,
            message.type,
            message.entries,
            draft.part,
            draft.ticket,
            frames,
            now + _FIRST_RESEND_SECONDS,
            draft.resets,
            draft.is_alone,
            draft.asked,
        )
        self._outbox.put(message.request, frames)

    def get(self, request: int) -> Pending | None:
        """Returns a request that waits for its answer."""
        return self._pending.get(request)

    def remove(self, request: int) -> None:
        """Forgets a request, now answered."""
        self._pending.pop(request, None)
        self._outbox.discard(request)

    def clear(self) -> None:
        """Forgets all requests."""
        self._pending.clear()
        self._outbox.clear()

    def resend(self, now: float) -> bool:
        """Sends again what is due; tells whether there was anything."""
        is_due = False
        for pending in self._pending.values():
            if now >= pending.resend_at:
                is_due = True
                pending.delay = min(2 * pending.delay, _MAX_RESEND_SECONDS)
                self._send_again(pending, now)
        return is_due

    def resend_all(self, now: float) -> None:
        """Sends again what the last connection may have swallowed: everything sent."""
        for pending in self._pending.values():
            if pending.id not in self._outbox:
                pending.delay = _FIRST_RESEND_SECONDS
                self._send_again(pending, now)

    def _send_again(self, pending: Pending, now: float) -> None:
        pending.attempt += 1
        head, *rest = pending.frames
        pending.frames = [set_attempt(head, pending.attempt), *rest]
        pending.resend_at = now + pending.delay
        self.num_resends += 1
        self._outbox.put(pending.id, pending.frames)

    def postpone(self, pending: Pending, now: float) -> None:
        """Puts off a resend, since the server is known to have the request."""
        pending.resend_at = now + pending.delay

    def next_resend(self) -> float:
        """When `resend` has to be called next."""
        return min((p.resend_at for p in self._pending.values()), default=math.inf)

    def __contains__(self, request: int) -> bool:
        return request in self._pending

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def __len__(self) -> int:
        return len(self._pending)
