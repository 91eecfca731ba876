"""How many cores this process may run on."""

from __future__ import annotations

import os

__all__ = ["num_cores"]


def num_cores() -> int:
    """Returns the number of cores that are ours: fewer than there are, where pinned."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
