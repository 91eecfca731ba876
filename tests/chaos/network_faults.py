"""Network faults in one direction, applied to whole messages.

Probabilities are per message and use a seeded generator. No function here waits: a held
message is forwarded after a later message, or when the caller releases it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from envserve.wire.constants import MessageType
from envserve.wire.message import peek, set_attempt
from tests.chaos.zmtp import first_frame

#: Maximum number of further messages before a stale copy is sent.
_MAX_STALE_BY: Final = 20
#: Maximum number of waiting copies; few, because messages may be large.
_MAX_STALE: Final = 64
_REQUESTS: Final = (MessageType.STEP, MessageType.RESET, MessageType.CALL)


@dataclass(frozen=True, kw_only=True)
class NetworkFaults:
    """The faults of one direction."""

    #: Probability that a message is dropped.
    drop: float = 0.0
    #: Probability that a message is sent twice in a row.
    duplicate: float = 0.0
    #: Probability that a copy of a message is sent after up to 20 later ones.
    stale_copy: float = 0.0
    #: Probability that the next message overtakes a message.
    reorder: float = 0.0
    #: Probability that a request is retried immediately, so that the retry arrives
    #: while the first attempt runs.
    retry: float = 0.0
    #: Mean number of bytes between connection resets, which can occur anywhere in a
    #: message; 0 for no resets.
    bytes_until_reset: float = 0.0
    #: Delay of all data in seconds.
    latency_seconds: float = 0.0
    #: Maximum of an additional, uniformly distributed delay per message, in seconds.
    jitter_seconds: float = 0.0
    #: Maximum number of bytes per write; 0 for no limit.
    slice_bytes: int = 0
    #: Whether all data is held back.
    is_stalled: bool = False


class Direction:
    """One direction of a proxy, over all its connections.

    Attributes:
      faults: The current faults; may be replaced at any time.
      counts: Number of occurrences of each fault, by field name; "messages" counts all
      messages.
    """

    def __init__(self, faults: NetworkFaults, seed: int) -> None:
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._held: bytes | None = None
        self._stale: list[tuple[int, bytes]] = []

    @property
    def has_held_message(self) -> bool:
        """Whether a message is being held until the next one overtakes it."""
        return self._held is not None

    def process(self, message: bytes) -> list[bytes]:
        """Return the messages to forward now that this message has arrived."""
        self.counts["messages"] += 1
        faults = self.faults
        if self._draw_and_count("drop", faults.drop):
            return []
        if self._draw(faults.stale_copy) and len(self._stale) < _MAX_STALE:
            due = self.counts["messages"] + int(self._random.integers(_MAX_STALE_BY))
            self._stale.append((due + 1, message))
        if self._held is None and self._draw(faults.reorder):
            self._held = message
            return self._pop_stale()
        outgoing = [message]
        if self._draw_and_count("duplicate", faults.duplicate):
            outgoing.append(message)
        if self._draw(faults.retry) and (retry := _retry_of(message)) is not None:
            self.counts["retry"] += 1
            outgoing.append(retry)
        if self._held is not None:
            self.counts["reorder"] += 1
            outgoing += self.release_held()
        return outgoing + self._pop_stale()

    def release_held(self) -> list[bytes]:
        """Return the held message, if any, because no other message has arrived."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def draw_delay(self) -> float:
        """Return the delay of the next piece in seconds."""
        faults = self.faults
        return faults.latency_seconds + faults.jitter_seconds * self._random.random()

    def draw_reset(self, num_bytes: int) -> int | None:
        """Return the number of bytes before a connection reset, or None for no reset.

        The distance between resets is distributed exponentially, so that every byte is
        equally likely to be the last one.
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

    def _draw_and_count(self, name: str, chance: float) -> bool:
        happens = self._draw(chance)
        if happens:
            self.counts[name] += 1
        return happens

    def _pop_stale(self) -> list[bytes]:
        now = self.counts["messages"]
        due = [message for at, message in self._stale if at <= now]
        if not due:
            return due
        self._stale = [(at, message) for at, message in self._stale if at > now]
        self.counts["stale_copy"] += len(due)
        return due


def _retry_of(message: bytes) -> bytes | None:
    """Return the next attempt at an env request; None for other messages."""
    part = first_frame(message)
    request = peek([message[part]])
    if request is None or request.type not in _REQUESTS:
        return None
    frame = set_attempt(message[part], request.attempt + 1)
    return message[: part.start] + frame + message[part.stop :]
