"""How much of long answers ZeroMQ still holds, since nobody has read them.

Short ones are bounded by their number; see SNDHWM in `router`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

from envserve.session.server.quotas import KEYLESS_USERS
from envserve.wire.message import Buffer, Peer, session_and_block

#: Rows so long are sent from where they are. They may change before a copy of an answer
#: has left, but only once the client has had another one: it drops this copy.
LONG_BYTES: Final = 256 << 10


class _SentFrame(NamedTuple):
    """A frame that was handed over; `view` is dead once it has left."""

    view: weakref.ref[memoryview]
    reader: object
    place: object
    num_bytes: int


class SendBudget:
    """What waits to be read, by user, or by session where users are not known."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        """Starts with nothing.

        Args:
          max_bytes: What may wait for a user, beside one answer for each block.
          max_total_bytes: What may wait for all of them.
        """
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._frames: list[_SentFrame] = []

    def admit(self, peer: Peer, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Returns frames to send at once; None if too many of that peer wait already.

        Who reads has at most one answer under way for a block. So one that has none is
        always answered, however long that is.
        """
        session, block = session_and_block(frames[0])
        reader = peer[-1] if peer[-1] not in KEYLESS_USERS else session
        place = reader, session, block
        num_bytes = sum(len(frame) for frame in frames if len(frame) >= LONG_BYTES)
        waiting = self._frames = [f for f in self._frames if f.view() is not None]
        own = sum(f.num_bytes for f in waiting if f.reader == reader)
        total = sum(f.num_bytes for f in waiting)
        if any(f.place == place for f in waiting) and (
            own + num_bytes > self._max_bytes
            or total + num_bytes > self._max_total_bytes
        ):
            return None
        admitted: list[Buffer] = []
        for frame in frames:
            if len(frame) >= LONG_BYTES:
                # ZeroMQ's thread lets go of what it was given: that tells it has left.
                frame = memoryview(frame)
                watched = _SentFrame(weakref.ref(frame), reader, place, len(frame))
                waiting.append(watched)
            admitted.append(frame)
        return admitted
