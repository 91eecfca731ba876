"""Measures, which take turns, so that a machine's moods meet all of them alike.

Ratios count of cases measured side by side, and the median over the turns.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from envserve.bench.workload import Load

__all__ = ["Measure", "Measurements", "Number", "stepping", "summary", "take_turns"]

Array = np.ndarray[Any, Any]
Measure = Callable[[], Mapping[str, float]]
"""Measures once; returns numbers by name."""
Number = str | Callable[[Mapping[str, float]], float]
"""Name of a number, or what makes one of all the numbers of a turn."""

#: Names of numbers: env steps per second, and per batch step the mean microseconds and
#: those that the stepping thread computes.
SPEED, MICROSECONDS, THREAD = "steps_per_second", "us_per_batch_step", "thread_us"
_WARM_UP_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Measurements:
    """What was measured.

    Attributes:
      by_case: One mapping of numbers by name per turn.
      skipped: By case, why it could not run.
    """

    by_case: Mapping[str, list[dict[str, float]]]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def values(self, case: str, number: Number) -> list[float]:
        """Returns a number of a case in each turn."""
        numbers = self.by_case[case]
        return [t[number] if isinstance(number, str) else number(t) for t in numbers]

    def median(self, case: str, number: Number) -> float:
        """Returns the median over the turns."""
        return statistics.median(self.values(case, number))

    def ratio(self, case: str, base: str, number: Number) -> float | None:
        """Returns the median of a case's ratio to another within each turn.

        None where either was not measured.
        """
        if case not in self.by_case or base not in self.by_case:
            return None
        pairs = zip(self.values(case, number), self.values(base, number), strict=True)
        return statistics.median(value / other for value, other in pairs)


def take_turns(
    cases: Mapping[str, Measure], num_turns: int, say: Callable[[str], None]
) -> Measurements:
    """Measures every case once per turn; tells what is going on."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(num_turns):
        # To and fro: no case always comes right after the same other one.
        for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
            say(f"... {turn + 1} of {num_turns}: {name}")
            measured[name].append(dict(cases[name]()))
    return Measurements(measured)


def stepping(step: Callable[[Any], Any], batches: Iterable[Any], load: Load) -> Measure:
    """Returns a measurement of a batched step, which goes on where the last ended."""
    actions = itertools.cycle(batches)

    def measure() -> Mapping[str, float]:
        time_each(step, actions, _WARM_UP_SECONDS)  # others have had their turn
        began = time.thread_time()
        durations = time_each(step, actions, load.seconds)
        computed = time.thread_time() - began
        return {
            **summary(durations, load.num_envs),
            THREAD: 1e6 * computed / len(durations),
        }

    return measure


def time_each(
    call: Callable[[Any], Any], arguments: Iterable[Any], seconds: float = math.inf
) -> Array:
    """Calls with one argument after the other, for so long; returns seconds of each."""
    clock = time.perf_counter
    instants = [clock()]
    deadline = instants[0] + seconds
    for argument in arguments:
        call(argument)
        instants.append(clock())
        if instants[-1] >= deadline:
            break
    return np.diff(instants)


def summary(durations: Array, num_envs: int) -> dict[str, float]:
    """Returns numbers of batch steps from the seconds of each."""
    mean = float(durations.mean())
    return {
        SPEED: num_envs / mean,
        MICROSECONDS: 1e6 * mean,
        "p50_us": 1e6 * float(np.percentile(durations, 50)),
        "p99_us": 1e6 * float(np.percentile(durations, 99)),
    }
