"""Measure durations reliably on machines that may stall."""

from __future__ import annotations

import math
from collections.abc import Callable

NUM_ATTEMPTS = 3


def fastest(attempt: Callable[[], float], limit: float) -> float:
    """Return the duration of the fastest of several attempts, in seconds.

    Slow code is slow in every attempt, but a machine is unlikely to stall in all of
    them. Stop after an attempt that took less than `limit`.

    Args:
      attempt: Function that makes one attempt, and returns its duration in seconds.
      limit: Duration in seconds that is fast enough.
    """
    fewest = math.inf
    for _ in range(NUM_ATTEMPTS):
        fewest = min(fewest, attempt())
        if fewest < limit:
            break
    return fewest
