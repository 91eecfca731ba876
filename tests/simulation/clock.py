"""Virtual time: a queue of events, and processes that can be paused."""

from __future__ import annotations

import collections
import heapq
import math
import random
from collections.abc import Callable
from typing import Any, Final

from envserve.wire.message import peek

#: Time in seconds, unique number (for order), callback, arguments of the callback.
Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]

#: Number of last events that an error report shows.
_NUM_TRACED: Final = 40


class VirtualClock:
    """A queue of events, each a function call.

    Attributes:
      now: Virtual time in seconds.
      num_events: Number of events that have been run.
      random: The source of all randomness.
    """

    def __init__(self, source: random.Random) -> None:
        """Create a clock without events, which starts at a random time."""
        self.now = 1000.0 * source.random()
        self.num_events = 0
        self.random = source
        self._num_scheduled = 0
        self._events: list[Event] = []
        self._trace: collections.deque[tuple[float, str, tuple[Any, ...]]] = (
            collections.deque(maxlen=_NUM_TRACED)
        )

    def schedule(self, at: float, event: Callable[..., None], *arguments: Any) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (at, self._num_scheduled, event, arguments))

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def next_at(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def step(self) -> None:
        at, _, event, arguments = heapq.heappop(self._events)
        self.now = max(self.now, at)
        self.num_events += 1
        self._trace.append((self.now, event.__qualname__, arguments))
        event(*arguments)

    def record(self, what: str, *arguments: Any) -> None:
        """Add an entry that is not an event to the trace."""
        self._trace.append((self.now, what, arguments))

    @property
    def trace(self) -> str:
        """The last events, one per line."""
        return "\n".join(
            f"{at:12.4f} {what} {', '.join(map(_show, arguments))}"
            for at, what, arguments in self._trace
        )


def _show(argument: Any) -> str:
    if isinstance(argument, list) and (message := peek(argument)) is not None:
        kind = getattr(message.type, "name", message.type)
        ids = f"{message.session % 10000} {message.boot} {message.epoch}"
        return f"{kind}({ids} #{message.request}.{message.attempt})"
    text = getattr(argument, "__qualname__", None) or repr(argument)
    return text if len(text) < 100 else f"{text[:100]}..."


class PausableProcess:
    """A process whose events wait while it is paused."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._is_paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def run_when_awake(self, event: Callable[..., None], *arguments: Any) -> None:
        """Run an event now, or when the process resumes."""
        if self._is_paused:
            self._waiting.append((event, arguments))
        else:
            event(*arguments)

    def pause(self, seconds: float) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.clock.schedule(self.clock.now + seconds, self.wake)

    def wake(self) -> None:
        """Resume, and run the waiting events, sometimes in random order."""
        if not self._is_paused:
            return
        self._is_paused = False
        waiting, self._waiting = self._waiting, []
        if self.clock.random.random() < 0.3:
            self.clock.random.shuffle(waiting)
        for event, arguments in waiting:
            self.run_when_awake(event, *arguments)
