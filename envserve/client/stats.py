"""Statistics of a batch: counts of steps and of each kind of fault, and latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from envserve.lane import Lane
from envserve.slab import Array, Status
from envserve.text import duration

#: Number of recent steps whose latencies are kept.
_NUM_LATENCIES: Final = 1024


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchStats:
    """Counters since the batch was made, and latencies of recent steps.

    Attributes:
      steps: Number of `step` and `recv` calls that returned rows.
      rows: Total number of rows that these calls returned.
      valid_rows: Number of valid rows, which can be used for training.
      invalid_rows: Maps names of `envserve.client.Status` to the numbers of invalid
        rows with that status.
      latency_seconds: Median ("p50"), 99th percentile ("p99") and maximum ("max")
        duration of the last 1,024 calls to `step`; empty before the first call.
      lanes: Maps lane names to counters, such as the number of worker "restarts" or,
        for a lane to a server, the numbers of "resends" and "reattaches".
    """

    steps: int
    rows: int
    valid_rows: int
    invalid_rows: Mapping[str, int] = field(default_factory=dict)
    latency_seconds: Mapping[str, float] = field(default_factory=dict)
    lanes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def fill(self) -> float:
        """Fraction of rows that are valid; 1 before the first step."""
        return self.valid_rows / self.rows if self.rows else 1.0

    def __repr__(self) -> str:
        return f"<BatchStats {self}>"

    def __str__(self) -> str:
        """Return a one-line summary."""
        parts = [
            f"{self.steps:,} steps",
            f"{self.valid_rows:,} of {self.rows:,} rows valid",
            *(f"{name}: {number:,}" for name, number in self.invalid_rows.items()),
            *(f"{k} {duration(v)}" for k, v in self.latency_seconds.items()),
        ]
        for lane, counts in self.lanes.items():
            counters = ", ".join(f"{key} {number:,}" for key, number in counts.items())
            parts.append(f"{lane}: {counters}")
        return "; ".join(parts)


class StepRecorder:
    """Counts steps and rows; costs almost no time while all rows are valid.

    Attributes:
      steps: Number of steps.
      rows: Total number of rows.
      latencies: Durations of the last calls to `step`, in seconds.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._invalid = np.zeros(len(Status), np.int64)

    def count_invalid(self, valid: Array, status: Array) -> None:
        """Count the invalid rows of a step, separately for each status."""
        self._invalid += np.bincount(status[~valid], minlength=len(Status))

    def stats(self, lanes: Sequence[Lane]) -> BatchStats:
        """Return all counters, including those of the lanes."""
        latencies = np.array(self.latencies)
        summary = {}
        if latencies.size:
            p50, p99 = np.percentile(latencies, (50, 99))
            largest = latencies.max()
            summary = {"p50": float(p50), "p99": float(p99), "max": float(largest)}
        return BatchStats(
            steps=self.steps,
            rows=self.rows,
            valid_rows=self.rows - int(self._invalid.sum()),
            invalid_rows={
                status.name: int(self._invalid[status])
                for status in Status
                if self._invalid[status]
            },
            latency_seconds=summary,
            lanes={
                lane.name if len(lanes) == 1 else f"{index}: {lane.name}": lane.stats()
                for index, lane in enumerate(lanes)
            },
        )
