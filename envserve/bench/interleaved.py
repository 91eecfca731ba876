"""Interleaved measurements: changes of the machine's speed affect all cases alike.

A ratio compares cases measured in the same turn; the median over the turns counts.
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

from envserve.bench.workload import Workload

Array = np.ndarray[Any, Any]
Measure = Callable[[], Mapping[str, float]]
"""Measures once; returns numbers by name."""
Metric = str | Callable[[Mapping[str, float]], float]
"""A number's name, or a function that computes one from all numbers of a turn."""

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

    def values(self, case: str, metric: Metric) -> list[float]:
        """Return a metric of a case, one value per turn."""
        turns = self.by_case[case]
        return [t[metric] if isinstance(metric, str) else metric(t) for t in turns]

    def median(self, case: str, metric: Metric) -> float:
        """Returns the median over the turns."""
        return statistics.median(self.values(case, metric))

    def ratio(self, case: str, base: str, metric: Metric) -> float | None:
        """Returns the median of a case's ratio to another within each turn.

        None where either was not measured.
        """
        if case not in self.by_case or base not in self.by_case:
            return None
        pairs = zip(self.values(case, metric), self.values(base, metric), strict=True)
        return statistics.median(value / other for value, other in pairs)


def interleave(
    cases: Mapping[str, Measure], num_turns: int, say: Callable[[str], None]
) -> Measurements:
    """Measure every case once per turn; report progress through `say`."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(num_turns):
        # To and fro: no case always comes right after the same other one.
        for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
            say(f"... {turn + 1} of {num_turns}: {name}")
            measured[name].append(dict(cases[name]()))
    return Measurements(measured)


def stepping(
    step: Callable[[Any], Any], batches: Iterable[Any], load: Workload
) -> Measure:
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
