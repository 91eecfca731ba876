"""Replies that wait because ZeroMQ's queue for their peer is full.

A queue holds 64 messages. A burst of more replies fills it even if the peer reads,
because ZeroMQ's threads need a millisecond to empty the queue. If the end of the burst
were dropped, the client would request these replies again after a second at the
earliest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from envserve.session.server.decisions import Reply
from envserve.wire.message import Peer

#: Pause before the next attempt to send a peer's replies. It doubles with each attempt
#: at which the queue is still full; above the maximum, the replies are dropped.
MIN_PAUSE_SECONDS: Final = 0.001
MAX_PAUSE_SECONDS: Final = 0.064
#: Maximum total size of the replies to all peers.
_MAX_BYTES: Final = 64 << 20
#: Number of bytes that are counted for a reply in addition to its frames.
_OVERHEAD_BYTES: Final = 256


@dataclass(slots=True)
class _Backlog:
    """The replies to a peer, and the time of the next attempt to send them."""

    retry_at: float
    pause: float = MIN_PAUSE_SECONDS
    replies: deque[Reply] = field(default_factory=deque)


class DeferredReplies(dict[Peer, _Backlog]):
    """The replies to peers whose queues are full. Times are monotonic seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0
        self._tried_at = -math.inf

    @property
    def retry_at(self) -> float:
        """Time at which to call `send`; one call sends to all peers that are due."""
        first = min(backlog.retry_at for backlog in self.values())
        return max(first, self._tried_at + MIN_PAUSE_SECONDS)

    def add(self, reply: Reply, now: float) -> bool:
        """Add a reply; return False if the replies would take too much memory."""
        size = _size_of(reply)
        if self._num_bytes + size > _MAX_BYTES:
            return False
        if reply.peer not in self:
            self[reply.peer] = _Backlog(now + MIN_PAUSE_SECONDS)
        self[reply.peer].replies.append(reply)
        self._num_bytes += size
        return True

    def send(self, send: Callable[[Reply], bool], now: float) -> list[Reply]:
        """Send the replies that are due, until the queues of their peers are full.

        Args:
          send: Function that returns False if the queue of the reply's peer is full.
          now: Monotonic seconds.

        Returns:
          Replies that were removed without being sent.
        """
        self._tried_at = now
        dropped: list[Reply] = []
        for peer, backlog in list(self.items()):
            if now < backlog.retry_at:
                continue
            replies, pause = backlog.replies, 2 * backlog.pause
            while replies and send(replies[0]):
                self._num_bytes -= _size_of(replies.popleft())
                pause = MIN_PAUSE_SECONDS
            if pause > MAX_PAUSE_SECONDS:
                self._num_bytes -= sum(map(_size_of, replies))
                dropped += replies
                replies.clear()
            backlog.pause, backlog.retry_at = pause, now + pause
            if not replies:
                del self[peer]
        return dropped


def _size_of(reply: Reply) -> int:
    return _OVERHEAD_BYTES + sum(map(len, reply.frames))
