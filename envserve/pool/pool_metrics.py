"""Counters of a pool: steps, faults, restarts, durations and episodes.

An ordinary step costs a few additions and no function call. Workers record the
durations of env steps and resets in the slab. Episodes are tracked only while a client
watches them. Other threads may read all counters at any time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from envserve.lane import Block
from envserve.slab import OK, Array, Slab, Status
from envserve.wire.status import Histogram, LeaseStatus
from envserve.worker.step_timings import BOUNDS, NUM_CELLS, RESET_CELL, STEP_CELL

#: All counters of a pool or server as one vector, so that the counters of several pools
#: can be added.
Counts = Array

#: Time for which episodes are tracked after a request.
_TRACKING_SECONDS: Final = 10.0
#: Maximum number of durations to store before they are added to the histogram.
MAX_DURATIONS: Final = 1000
_NAMES: Final = [status.name for status in Status]
_NUM_STATUSES: Final = len(_NAMES)
#: Limit for values read from a worker's cells, because an env may have overwritten
#: them. It is nine years in nanoseconds, so that the sum of a histogram's cells still
#: fits into 63 bits.
_MAX_CELL: Final = 1 << 58
#: Offsets in `Counts` of the restarts, the rows by status, the faults by status, and
#: three histograms; the last offset is the length.
_COUNT_OFFSETS: Final = (
    0,
    *accumulate([1, _NUM_STATUSES, _NUM_STATUSES, NUM_CELLS, NUM_CELLS, NUM_CELLS]),
)


class PoolMetrics:
    """Counters of one pool.

    Attributes:
      steps: Number of steps by block, excluding lost steps.
      invalid: Number of invalid transitions (one per row and step) by status.
      restarts: Number of restarted workers.
      faults: Number of failures of envs and workers by status.
      durations: Durations in seconds of block steps that are not yet in the histogram.
      num_episodes: Number of tracked episodes.
      num_recoveries: Number of times a row recovered after a loss.
      is_tracking: Whether episodes are tracked.
      episodes: The most recent tracked episodes; see `LeaseStatus`.
      recoveries: The most recent recoveries of rows; see `LeaseStatus`.
      slab: The pool's slab, or None.
    """

    def __init__(self, blocks: Sequence[Block], *, counts_resets: bool = False) -> None:
        """Set all counters to zero.

        With `counts_resets`, the step after the end of an episode only resets the env,
        so it does not count towards the next episode.
        """
        self.steps = [0] * len(blocks)
        self.invalid, self.faults = [0] * _NUM_STATUSES, [0] * _NUM_STATUSES
        self.restarts = self.num_episodes = self.num_recoveries = 0
        self.durations: list[float] = []
        self.is_tracking = False
        self.episodes: deque[tuple[int, int, float, int]] = deque(maxlen=256)
        self.recoveries: deque[tuple[int, int, int]] = deque(maxlen=64)
        self._blocks = blocks
        #: Histogram of the durations of block steps: their sum in ns, then the counts.
        self._histogram = np.zeros(NUM_CELLS, np.int64)
        self._first_step_offset = int(counts_resets)
        self._tracks_until = -math.inf
        self._returns = np.zeros(blocks[-1].stop)
        #: For each block, the rewards, flags, statuses and returns of its rows; empty
        #: until `start_tracking` is called.
        self._views: list[list[Array]] = []
        #: For each row, its block's step count at the start of the episode, if known.
        self._first_steps: list[int | None] = [None] * blocks[-1].stop
        self.slab: Slab | None = None

    def record_step(self, block: int, seconds: float, now: float) -> None:
        """Count a step of a block; `BlockOperations.handle` inlines the fast path."""
        self.steps[block] += 1
        self.durations.append(seconds)
        self.update_episodes(block, now)

    def record_lost(self, index: int, status: int, since: float, now: float) -> None:
        """Count one lost transition per row; the block was absent since `since`."""
        block = self._blocks[index]
        milliseconds = int(1000 * (now - since))
        self.invalid[status] += len(block.rows)
        for row in block.rows:
            self.num_recoveries += 1
            self.recoveries.append((self.num_recoveries, row, milliseconds))
            self._first_steps[row] = self.steps[index] + self._first_step_offset
            self._returns[row] = 0.0

    def begin_episodes(self, rows: Iterable[int], block: int) -> None:
        """Record that episodes of these rows begin with the block's next step."""
        for row in rows:
            self._first_steps[row], self._returns[row] = self.steps[block], 0.0

    def start_tracking(self, now: float) -> None:
        """Track episodes for the next 10 seconds.

        Episodes that are already running are not counted, because their return is
        unknown.
        """
        self._tracks_until = now + _TRACKING_SECONDS
        if not self.is_tracking and (slab := self.slab) is not None:
            self._first_steps, rows = [None] * len(self._first_steps), slab.rows
            arrays = rows.reward, rows.terminated, rows.truncated, rows.status
            self._views = [
                [array[block.row_slice] for array in (*arrays, self._returns)]
                for block in self._blocks
            ]
            self.is_tracking = True

    def update_episodes(self, index: int, now: float) -> None:
        """Update the episodes after a step of a block; bin the durations if needed."""
        if len(self.durations) > MAX_DURATIONS:
            self._bin_durations()
        self.is_tracking &= now <= self._tracks_until
        if not self.is_tracking:
            return
        reward, terminated, truncated, status, returns = self._views[index]
        returns += reward
        ended = (terminated | truncated).tobytes()
        # Make few calls, because each one is slow while the CPU caches are cold.
        position, steps = ended.find(1), self.steps[index]
        start = self._blocks[index].start
        while position >= 0:
            first_step = self._first_steps[start + position]
            if first_step is not None and status.item(position) == OK:
                self.num_episodes += 1
                episode = self.num_episodes, start + position, returns.item(position)
                self.episodes.append((*episode, steps - first_step))
            returns[position] = 0.0
            self._first_steps[start + position] = steps + self._first_step_offset
            position = ended.find(1, position + 1)

    def _bin_durations(self) -> Array:
        """Add the stored durations to their histogram; return its sum and counts.

        Another thread may call this to read the counters, so the list is replaced
        before it is read.
        """
        durations, self.durations = self.durations, []
        if durations:
            bins = np.bincount(
                np.searchsorted(BOUNDS, durations), None, len(BOUNDS) + 1
            )
            self._histogram += np.append(int(1e9 * sum(durations)), bins)
        return self._histogram

    def running_return(self, row: int) -> float | None:
        """Return the sum of rewards in a row's current episode; None if not tracked."""
        is_known = self.is_tracking and self._first_steps[row] is not None
        return float(self._returns[row]) if is_known else None

    @property
    def num_env_steps(self) -> int:
        """Number of env steps with a valid result."""
        sizes = (len(block.rows) for block in self._blocks)
        return sum(map(int.__mul__, self.steps, sizes)) - self.invalid[Status.ENV_ERROR]

    @property
    def counts(self) -> Counts:
        """All counters as a vector, which can be added to other pools' counters."""
        cells = np.zeros(RESET_CELL + NUM_CELLS, np.int64)
        if (slab := self.slab) is not None:  # another thread may set it to None
            cells = slab.heartbeats.sum(0).clip(0, _MAX_CELL)
        rows = [self.num_env_steps, *self.invalid[1:]]
        steps, resets = (
            cells[start : start + NUM_CELLS] for start in (STEP_CELL, RESET_CELL)
        )
        return np.concatenate(
            [[self.restarts], rows, self.faults, self._bin_durations(), steps, resets]
        )

    def status(self, max_episodes: int, **fields: Any) -> LeaseStatus:
        """Return the counters and other fields as the status of a lease.

        It contains at most `max_episodes` recent episodes, and as many recoveries.
        """
        counters = status_fields(self.counts)
        del counters["resets"], counters["reset_seconds"]
        env_seconds = counters.pop("env_step_seconds").sum
        return LeaseStatus(
            **counters,
            env_seconds=env_seconds,
            num_episodes=self.num_episodes,
            episodes=tuple(self.episodes)[-max_episodes:],
            num_recoveries=self.num_recoveries,
            recoveries=tuple(self.recoveries)[-max_episodes:],
            **fields,
        )


def sum_counts(all_counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counters of several pools."""
    total: Counts = np.sum([np.zeros(_COUNT_OFFSETS[-1], np.int64), *all_counts], 0)
    return total.clip(0, _MAX_CELL)


def status_fields(counts: Counts) -> dict[str, Any]:
    """Return counters as fields of a `ServerStatus`."""
    cells = counts.tolist()
    parts = [cells[start:stop] for start, stop in pairwise(_COUNT_OFFSETS)]
    rows, faults = (
        {name: n for name, n in zip(_NAMES, part, strict=True) if n}
        for part in parts[1:3]
    )
    batch, steps, resets = (
        Histogram(bounds=BOUNDS, counts=tuple(p[1:]), sum=p[0] / 1e9) for p in parts[3:]
    )
    return {
        "steps": parts[1][0],
        "rows": rows,
        "restarts": parts[0][0],
        "faults": faults,
        "batch_seconds": batch,
        "env_step_seconds": steps,
        "reset_seconds": resets,
        "resets": resets.count,
    }
