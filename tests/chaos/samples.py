"""Samples of process memory, and counts of resources that remain after a run."""

from __future__ import annotations

import gc
import os
import time
from array import array
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np

from benchmarks.support.processes import usage_of, with_descendants

_SHARED_MEMORY: Final = Path("/dev/shm")
#: Seconds within which closed threads and processes must have exited.
_GRACE_SECONDS: Final = 5.0


class MemorySamples:
    """Resident memory of processes by role; a restarted process keeps its role."""

    def __init__(self) -> None:
        #: Maps roles to the times and sizes of all samples. Arrays, because lists would
        #: make this process grow by half a megabyte in ten minutes.
        self._taken: dict[str, tuple[array[float], array[int]]] = {}

    def take(self, instant: float, roles: dict[str, int]) -> None:
        for name, pid in roles.items():
            for index, each in enumerate(_own_descendants(pid, roles)):
                usage = usage_of(each)
                if usage is None:
                    continue
                part = name if index == 0 else f"a process below {name}"
                times, sizes = self._taken.setdefault(part, (array("d"), array("q")))
                times.append(instant)
                sizes.append(usage.resident_bytes)

    def growths(
        self, duration: float, start: tuple[float, float], end: tuple[float, float]
    ) -> dict[str, float]:
        """Return the memory growth in bytes by role, from one time span to another.

        If several processes have the same role, the largest one counts.

        Args:
          duration: Total duration in seconds.
          start: Start and end of the first span, as fractions of the duration.
          end: Start and end of the second span, as fractions of the duration.
        """
        found = {}
        for name, samples in self._taken.items():
            was, is_now = (self._level(samples, duration, s) for s in (start, end))
            found[name] = is_now - was
        return found

    @staticmethod
    def _level(
        samples: tuple[array[float], array[int]],
        duration: float,
        span: tuple[float, float],
    ) -> float:
        """Return the median of a span, or the nearest sample if the span has none."""
        most: dict[float, int] = {}
        for instant, value in zip(*samples, strict=True):
            most[instant] = max(value, most.get(instant, 0))
        low, high = (share * duration for share in span)
        inside = [value for instant, value in most.items() if low <= instant <= high]
        if not inside:
            nearest = min(most, key=lambda instant: abs(instant - (low + high) / 2))
            inside = [most[nearest]]
        return float(np.median(inside))


class Leftovers(NamedTuple):
    """Resources held by this process.

    Attributes:
      files: Number of open descriptors.
      threads: Number of threads.
      processes: Number of descendants.
      segments: Number of files in shared memory.
    """

    files: int
    threads: int
    processes: int
    segments: int

    @classmethod
    def now(cls, before: Leftovers | None = None) -> Self:
        """Count resources; wait up to 5 s until the counts are at most those of
        `before`.
        """
        gc.collect()  # mapped memory is freed when its last array is collected
        give_up_at = time.monotonic() + _GRACE_SECONDS
        while True:
            found = cls._count()
            is_clean = before is None or all(
                is_now <= was for was, is_now in zip(before, found, strict=True)
            )
            if is_clean or time.monotonic() > give_up_at:
                return found
            time.sleep(0.01)

    @classmethod
    def _count(cls) -> Self:
        pid = os.getpid()
        usage = usage_of(pid)
        assert usage is not None
        segments = len(list(_SHARED_MEMORY.iterdir())) if _SHARED_MEMORY.exists() else 0
        others = len(with_descendants(pid)) - 1
        return cls(usage.num_files, usage.num_threads, others, segments)

    def compared_with(self, later: Leftovers) -> dict[str, tuple[int, int]]:
        pairs = zip(self, later, strict=True)
        return dict(zip(self._fields, pairs, strict=True))


def _own_descendants(pid: int, roles: dict[str, int]) -> list[int]:
    """Return a process and its descendants, except processes with other roles."""
    others: set[int] = set()
    for other in roles.values():
        if other != pid and other in with_descendants(pid):
            others |= set(with_descendants(other))
    return [each for each in with_descendants(pid) if each not in others]
