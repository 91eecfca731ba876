"""A client's requests: what waits for an answer, and what waits to be sent.

A request is sent again, byte for byte but for its attempt, after 1 s, then 2 s, then
every 4 s. At most one copy of it waits to be sent, so the outbox is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from envserve.wire import (
    Buffer,
    Message,
    MessageType,
    RowPart,
    encode,
    set_attempt,
)

__all__ = ["Outbox", "Pending", "Requests"]

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

    def __len__(self) -> int:
        return len(self._frames)


@dataclass(slots=True)
class Pending:
    """A request that has not been answered."""

    id: int
    type: MessageType | int
    entries: tuple[tuple[int, int], ...]
    part: RowPart | None
    ticket: int
    frames: list[Buffer]
    resend_at: float
    delay: float = _FIRST_RESEND_SECONDS
    attempt: int = 0


class Requests:
    """Requests in flight, with their resends."""

    def __init__(self, outbox: Outbox) -> None:
        """Takes where to put what is to be sent."""
        self._outbox = outbox
        self._pending: dict[int, Pending] = {}

    def add(
        self,
        message: Message,
        now: float,
        part: RowPart | None = None,
        ticket: int = 0,
    ) -> None:
        """Sends a request for the first time."""
        frames = encode(message)
        self._pending[message.request] = Pending(
            message.request,
            message.type,
            message.entries,
            part,
            ticket,
            frames,
            now + _FIRST_RESEND_SECONDS,
        )
        self._outbox.put(message.request, frames)

    def get(self, request: int) -> Pending | None:
        """Returns a request that waits for its answer."""
        return self._pending.get(request)

    def remove(self, request: int) -> None:
        """Forgets a request, now answered."""
        self._pending.pop(request, None)
        self._outbox.discard(request)

    def clear(self) -> list[Pending]:
        """Forgets all requests, and returns them."""
        pending = list(self._pending.values())
        self._pending.clear()
        self._outbox.clear()
        return pending

    def resend(self, now: float) -> bool:
        """Sends again what is due; tells whether there was anything."""
        is_due = False
        for pending in self._pending.values():
            if now >= pending.resend_at:
                is_due = True
                pending.attempt += 1
                head, *rest = pending.frames
                pending.frames = [set_attempt(head, pending.attempt), *rest]
                pending.delay = min(2 * pending.delay, _MAX_RESEND_SECONDS)
                pending.resend_at = now + pending.delay
                self._outbox.put(pending.id, pending.frames)
        return is_due

    def postpone(self, pending: Pending, now: float) -> None:
        """Puts off a resend, since the server is known to have the request."""
        pending.resend_at = now + pending.delay

    def next_resend(self) -> float:
        """When `resend` has to be called next."""
        return min((p.resend_at for p in self._pending.values()), default=math.inf)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def __len__(self) -> int:
        return len(self._pending)
