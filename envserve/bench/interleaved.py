"""Measure cases alternately, so that changes in the machine's speed affect all cases.

A ratio compares two cases within the same round; results are medians over the rounds.
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
from envserve.slab import Array

Measure = Callable[[], Mapping[str, float]]
"""Function that measures a case once; returns a dict from metrics to their values."""
Metric = str | Callable[[Mapping[str, float]], float]
"""Name of a result, or a function that computes a value from the results of a round."""

#: Names of metrics: env steps per second, mean microseconds per batch step, and CPU
#: time of the stepping thread in microseconds per batch step.
SPEED, MICROSECONDS, THREAD = "steps_per_second", "us_per_batch_step", "thread_us"
#: Maximum time of the steps before a measurement, which are not measured. They take no
#: longer than the measurement.
_WARM_UP_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Measurements:
    """The results of all cases and rounds.

    Attributes:
      by_case: Maps each case to its results, one dict per round from the names of
        metrics to their values.
      skipped: Maps each case that could not run to the reason.
    """

    by_case: Mapping[str, list[dict[str, float]]]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def values(self, case: str, metric: Metric) -> list[float]:
        """Return the values of a metric for a case, one per round."""
        rounds = self.by_case[case]
        return [r[metric] if isinstance(metric, str) else metric(r) for r in rounds]

    def median(self, case: str, metric: Metric) -> float:
        """Return the median of a metric for a case over the rounds."""
        return statistics.median(self.values(case, metric))

    def ratio(self, case: str, base: str, metric: Metric) -> float | None:
        """Return the ratio of `case` to `base` in a metric: the median over the rounds.

        Returns None if either case was not measured.
        """
        if case not in self.by_case or base not in self.by_case:
            return None
        pairs = zip(self.values(case, metric), self.values(base, metric), strict=True)
        return statistics.median(value / other for value, other in pairs)


def interleave(
    cases: Mapping[str, Measure], num_rounds: int, report: Callable[[str], None]
) -> Measurements:
    """Measure every case once per round; pass progress messages to `report`."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(num_rounds):
        # Alternate the direction, so that no case always follows the same other case.
        for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
            report(f"... {number + 1} of {num_rounds}: {name}")
            measured[name].append(dict(cases[name]()))
    return Measurements(measured)


def make_measure(
    step: Callable[[Any], Any], batches: Iterable[Any], load: Workload
) -> Measure:
    """Return a `Measure` that times `step`, cycling through the action batches."""
    actions = itertools.cycle(batches)

    def measure() -> Mapping[str, float]:
        # Refill the CPU caches, which the other cases have used since the last round.
        time_each(step, actions, min(_WARM_UP_SECONDS, load.seconds))
        started_at = time.thread_time()
        durations = time_each(step, actions, load.seconds)
        cpu_seconds = time.thread_time() - started_at
        return {
            **summary(durations, load.num_envs),
            THREAD: 1e6 * cpu_seconds / len(durations),
        }

    return measure


def time_each(
    call: Callable[[Any], Any], arguments: Iterable[Any], seconds: float = math.inf
) -> Array:
    """Call a function with each argument; return the durations of the calls in seconds.

    Stop after `seconds`, unless the arguments run out earlier.
    """
    clock = time.perf_counter
    timestamps = [clock()]
    deadline = timestamps[0] + seconds
    for argument in arguments:
        call(argument)
        timestamps.append(clock())
        if timestamps[-1] >= deadline:
            break
    return np.diff(timestamps)


def summary(durations: Array, num_envs: int) -> dict[str, float]:
    """Return the speed, and the mean, p50 and p99 microseconds of a batch step.

    `durations` contains the seconds of each batch step.
    """
    mean = float(durations.mean())
    return {
        SPEED: num_envs / mean,
        MICROSECONDS: 1e6 * mean,
        "p50_us": 1e6 * float(np.percentile(durations, 50)),
        "p99_us": 1e6 * float(np.percentile(durations, 99)),
    }
