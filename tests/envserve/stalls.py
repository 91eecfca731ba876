"""Measure durations on machines that may stall."""

from __future__ import annotations

import math
from collections.abc import Callable

NUM_ATTEMPTS = 3


def fastest(attempt: Callable[[], float], limit: float) -> float:
    """Return the seconds of the fastest of several attempts.

    Code that is always too slow is slow in every attempt, but a machine is not likely
    to stall in all of them. Stop after an attempt that took less than `limit`.

    Args:
      attempt: Makes one attempt, and returns the seconds that it took.
      limit: Seconds of an attempt that is fast enough.
    """
    fewest = math.inf
    for _ in range(NUM_ATTEMPTS):
        fewest = min(fewest, attempt())
        if fewest < limit:
            break
    return fewest
