"""What a bad network does to the messages of one direction.

Chances are per message, and drawn from a seeded generator. Nothing here waits: what is
held back goes on with a later message, or when the owner releases it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from envserve.wire.constants import MessageType
from envserve.wire.message import peek, set_attempt
from tests.chaos.zmtp import first_frame

#: A stale copy comes after at most so many further messages.
_MAX_STALE_BY: Final = 20
#: Copies that wait at once; they may be large.
_MAX_STALE: Final = 64
_REQUESTS: Final = (MessageType.STEP, MessageType.RESET, MessageType.CALL)


@dataclass(frozen=True, kw_only=True)
class NetworkFaults:
    """How often, and how, one direction fails."""

    #: Chance that a message is lost.
    drop: float = 0.0
    #: Chance that a message comes twice in a row.
    duplicate: float = 0.0
    #: Chance that a copy of a message comes after up to 20 later ones.
    stale_copy: float = 0.0
    #: Chance that a message is overtaken by the next one.
    reorder: float = 0.0
    #: Chance that a request is followed at once by a second attempt at it, which thus
    #: arrives while the first one runs.
    retry: float = 0.0
    #: Mean number of bytes after which a connection is reset, wherever that is; 0 for
    #: never.
    bytes_until_reset: float = 0.0
    #: Seconds that everything takes longer.
    latency_seconds: float = 0.0
    #: Further seconds, at most, drawn evenly for each message.
    jitter_seconds: float = 0.0
    #: Most bytes that are written at once; 0 for any number.
    slice_bytes: int = 0
    #: Whether nothing passes for now; it is kept, and comes later.
    is_stalled: bool = False


class Direction:
    """One direction of a proxy, over all its connections.

    Attributes:
      faults: May be replaced at any time.
      counts: How often each toxic has struck, by the name of its field; and the
        number of `messages` that came.
    """

    def __init__(self, faults: NetworkFaults, seed: int) -> None:
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._held: bytes | None = None
        self._stale: list[tuple[int, bytes]] = []

    @property
    def is_holding(self) -> bool:
        """Whether a message waits for one that overtakes it."""
        return self._held is not None

    def take(self, message: bytes) -> list[bytes]:
        """Returns what goes on now that this message has come."""
        self.counts["messages"] += 1
        faults = self.faults
        if self._strikes("drop", faults.drop):
            return []
        if self._draw(faults.stale_copy) and len(self._stale) < _MAX_STALE:
            due = self.counts["messages"] + int(self._random.integers(_MAX_STALE_BY))
            self._stale.append((due + 1, message))
        if self._held is None and self._draw(faults.reorder):
            self._held = message
            return self._pop_stale()
        going = [message]
        if self._strikes("duplicate", faults.duplicate):
            going.append(message)
        if self._draw(faults.retry) and (retry := _retry_of(message)) is not None:
            self.counts["retry"] += 1
            going.append(retry)
        if self._held is not None:
            self.counts["reorder"] += 1
            going += self.release()
        return going + self._pop_stale()

    def release(self) -> list[bytes]:
        """Returns the message that was held back, if any, since no other has come."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def draw_delay(self) -> float:
        """Returns how many seconds the next piece takes longer."""
        faults = self.faults
        return faults.latency_seconds + faults.jitter_seconds * self._random.random()

    def draw_reset(self, num_bytes: int) -> int | None:
        """Returns after how many of the next bytes the connection is reset, if at all.

        The distance between resets is distributed exponentially: wherever a connection
        stands, the next byte is as likely the last one as any other.
        """
        mean = self.faults.bytes_until_reset
        if not mean:
            return None
        distance = self._random.exponential(mean)
        if distance >= num_bytes:
            return None
        self.counts["reset"] += 1
        return int(distance)

    def _draw(self, chance: float) -> bool:
        return bool(chance) and self._random.random() < chance

    def _strikes(self, name: str, chance: float) -> bool:
        strikes = self._draw(chance)
        if strikes:
            self.counts[name] += 1
        return strikes

    def _pop_stale(self) -> list[bytes]:
        now = self.counts["messages"]
        due = [message for at, message in self._stale if at <= now]
        if not due:
            return due
        self._stale = [(at, message) for at, message in self._stale if at > now]
        self.counts["stale_copy"] += len(due)
        return due


def _retry_of(message: bytes) -> bytes | None:
    """Returns the next attempt at a request on envs; None for any other message."""
    part = first_frame(message)
    request = peek([message[part]])
    if request is None or request.type not in _REQUESTS:
        return None
    frame = set_attempt(message[part], request.attempt + 1)
    return message[: part.start] + frame + message[part.stop :]
