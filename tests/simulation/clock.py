"""Virtual time: what happens next, and at which instant."""

from __future__ import annotations

import collections
import heapq
import math
import random
from collections.abc import Callable
from typing import Any, Final

from envserve.wire.message import peek

#: When; a number that no other has; what; with which arguments.
Planned = tuple[float, int, Callable[..., None], tuple[Any, ...]]

#: Events that a failure shows.
_NUM_TRACED: Final = 40


class VirtualClock:
    """A queue of events, each a call.

    Attributes:
      now: Monotonic seconds.
      random: Where all randomness comes from.
    """

    def __init__(self, source: random.Random) -> None:
        """Starts without events, at an instant that is not 0."""
        self.now = 1000.0 * source.random()
        self.num_events = 0
        self.random = source
        self._num_planned = 0
        self._events: list[Planned] = []
        self._trace: collections.deque[tuple[float, str, tuple[Any, ...]]] = (
            collections.deque(maxlen=_NUM_TRACED)
        )

    def plan(self, at: float, event: Callable[..., None], *arguments: Any) -> None:
        self._num_planned += 1
        heapq.heappush(self._events, (at, self._num_planned, event, arguments))

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

    def note(self, what: str, *arguments: Any) -> None:
        """Has a failure show something beyond events."""
        self._trace.append((self.now, what, arguments))

    @property
    def trace(self) -> str:
        """The last events, a line for each."""
        return "\n".join(
            f"{at:12.4f} {what} {', '.join(map(_show, arguments))}"
            for at, what, arguments in self._trace
        )


def _show(argument: Any) -> str:
    if isinstance(argument, list) and (message := peek(argument)) is not None:
        kind = getattr(message.type, "name", message.type)
        numbers = f"{message.session % 10000} {message.boot} {message.epoch}"
        return f"{kind}({numbers} #{message.request}.{message.attempt})"
    text = getattr(argument, "__qualname__", None) or repr(argument)
    return text if len(text) < 100 else f"{text[:100]}..."


class PausableProcess:
    """A process that can be paused: what concerns it waits until it goes on."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._is_paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def do(self, event: Callable[..., None], *arguments: Any) -> None:
        """Lets an event happen to it, now or when it is awake."""
        if self._is_paused:
            self._waiting.append((event, arguments))
        else:
            event(*arguments)

    def pause(self, seconds: float) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.clock.plan(self.clock.now + seconds, self.wake)

    def wake(self) -> None:
        """Lets it go on, with what has come meanwhile in any order."""
        if not self._is_paused:
            return
        self._is_paused = False
        waiting, self._waiting = self._waiting, []
        if self.clock.random.random() < 0.3:
            self.clock.random.shuffle(waiting)
        for event, arguments in waiting:
            self.do(event, *arguments)
