"""Limits the bytes of large replies that ZeroMQ queues for slow clients.

ZeroMQ does not report which frames were sent, but it releases each uncopied frame after
sending it. Each large frame is therefore passed as a memoryview with a weak reference;
frames whose reference is alive are still waiting. The number of short replies is
limited instead; see SNDHWM in `server_sockets`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

from envserve.session.server.quotas import KEYLESS_USERS
from envserve.wire.message import Buffer, Peer, session_and_block

#: Minimum size of a large frame, which is sent from the slab without a copy. Its rows
#: may change before ZeroMQ has sent it, but only after the client has received another
#: copy of the reply; the client then ignores this frame.
LARGE_FRAME_BYTES: Final = 256 << 10


class _SentFrame(NamedTuple):
    """A large frame that was passed to ZeroMQ.

    Attributes:
      view: The frame; the reference is dead once ZeroMQ has sent it.
      reader: Receiver to which the limit applies: a user or, without keys, a session.
      destination: Reader, session and block.
      num_bytes: Length of the frame.
    """

    view: weakref.ref[memoryview]
    reader: object
    destination: object
    num_bytes: int


class SendBudget:
    """Counts unsent bytes of large frames by user; without keys, by session."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        """Create an empty budget.

        One reply for each block is always sent, even beyond the limits.

        Args:
          max_bytes: Maximum unsent bytes for one user.
          max_total_bytes: Maximum unsent bytes for all users.
        """
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._frames: list[_SentFrame] = []

    def admit(self, peer: Peer, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Return the frames to send immediately; None if the reply must be dropped.

        A client that reads its replies has at most one reply in flight for a block, so
        a block with none in flight gets its reply regardless of the size.
        """
        session, block = session_and_block(frames[0])
        reader = peer[-1] if peer[-1] not in KEYLESS_USERS else session
        destination = reader, session, block
        num_bytes = sum(len(f) for f in frames if len(f) >= LARGE_FRAME_BYTES)
        waiting = self._frames = [f for f in self._frames if f.view() is not None]
        for_reader = sum(f.num_bytes for f in waiting if f.reader == reader)
        total = sum(f.num_bytes for f in waiting)
        if any(f.destination == destination for f in waiting) and (
            for_reader + num_bytes > self._max_bytes
            or total + num_bytes > self._max_total_bytes
        ):
            return None
        admitted: list[Buffer] = []
        for frame in frames:
            if len(frame) >= LARGE_FRAME_BYTES:
                frame = memoryview(frame)
                view = weakref.ref(frame)
                waiting.append(_SentFrame(view, reader, destination, len(frame)))
            admitted.append(frame)
        return admitted
