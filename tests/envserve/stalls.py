"""How long something takes where the machine may stand still meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable

NUM_ATTEMPTS = 3


def soonest(attempt: Callable[[], float], enough: float) -> float:
    """Returns the fewest seconds of some attempts; each says how long it took.

    What is always late is late in each; a machine that stands still, or has others to
    run, is not likely to in all. One that took less than enough is the last.
    """
    fewest = math.inf
    for _ in range(NUM_ATTEMPTS):
        fewest = min(fewest, attempt())
        if fewest < enough:
            break
    return fewest
