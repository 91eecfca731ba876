"""What a pool has been through, in numbers: counted once, as outcomes are made.

The usual step costs a few additions and no call. Workers count their seconds in the
slab. Episodes are followed only while somebody watches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from envserve.lane import Block
from envserve.slab import Slab, Status
from envserve.wire.status import Histogram, LeaseStatus
from envserve.worker.step_timings import BOUNDS, NUM_CELLS, RESET_CELL, STEP_CELL

__all__ = ["MAX_WAITS", "Counts", "PoolMetrics", "add", "status_fields"]

Array = np.ndarray[Any, Any]
#: All that a pool, or a server, has counted: sums of them mean the same.
Counts = Array

#: For how long episodes are followed after somebody has looked.
_WATCH_SECONDS: Final = 10.0
#: How many durations are kept before they are sorted by how long they are.
MAX_WAITS: Final = 1000
_NAMES: Final = [status.name for status in Status]
_KINDS: Final = len(_NAMES)
_OK: Final = int(Status.OK)
#: An env may have written any number to the cells of its worker. This is nine years of
#: nanoseconds, and all cells of a histogram together still fit into 63 bits.
_MOST: Final = 1 << 58
#: What stands where in `Counts`: restarts, rows and faults by status, histograms.
_EDGES: Final = (0, *accumulate([1, _KINDS, _KINDS, NUM_CELLS, NUM_CELLS, NUM_CELLS]))


class PoolMetrics:
    """Counts for one pool.

    Attributes:
      steps: Steps by block, of which rows came from the envs.
      invalid: Rows of steps that were not valid, by status.
      restarts: How often workers were replaced.
      faults: How often envs or workers failed, by status.
      waits: How long steps of blocks took, the last `MAX_WAITS` at most.
      is_watched: Whether episodes are followed.
      episodes: The last that ended, and `recoveries` of rows; see `LeaseStatus`.
    """

    def __init__(self, blocks: Sequence[Block], *, counts_resets: bool = False) -> None:
        """Starts at zero; `counts_resets` if the step after an episode is its reset."""
        self.steps = [0] * len(blocks)
        self.invalid, self.faults = [0] * _KINDS, [0] * _KINDS
        self.restarts = self.num_episodes = self.num_recoveries = 0
        self.waits: list[float] = []
        self.is_watched = False
        self.episodes: deque[tuple[int, int, float, int]] = deque(maxlen=256)
        self.recoveries: deque[tuple[int, int, int]] = deque(maxlen=64)
        self._blocks = blocks
        self._sorted = np.zeros(NUM_CELLS, np.int64)
        self._first_step = int(counts_resets)
        self._watched_until = -math.inf
        self._returns = np.zeros(blocks[-1].stop)
        #: Of each block's rows, once somebody has looked.
        self._views: list[list[Array]] = []
        #: At which step of its block each row's episode began, if that was seen.
        self._begun: list[int | None] = [None] * blocks[-1].stop
        self.slab: Slab | None = None  # while the pool has one

    def record_step(self, block: int, seconds: float, now: float) -> None:
        """Counts a step of a block; its usual case stands where outcomes are made."""
        self.steps[block] += 1
        self.waits.append(seconds)
        self.follow_episodes(block, now)

    def record_lost(self, index: int, status: int, since: float, now: float) -> None:
        """Counts a step that was answered by a lost row for each env of a block."""
        block = self._blocks[index]
        milliseconds = int(1000 * (now - since))
        self.invalid[status] += len(block.rows)
        for row in block.rows:
            self.num_recoveries += 1
            self.recoveries.append((self.num_recoveries, row, milliseconds))
        self.begin_episodes(block.rows, index)

    def begin_episodes(self, rows: Iterable[int], block: int) -> None:
        """Notes that episodes begin, with the block's next step."""
        for row in rows:
            self._begun[row], self._returns[row] = self.steps[block], 0.0

    def watch(self, now: float) -> None:
        """Has episodes be followed for a while.

        One that has begun before is not counted, since nobody knows its return.
        """
        self._watched_until = now + _WATCH_SECONDS
        if not self.is_watched and (slab := self.slab) is not None:
            self._begun, rows = [None] * len(self._begun), slab.rows
            arrays = rows.reward, rows.terminated, rows.truncated, rows.status
            self._views = [
                [array[block.part] for array in (*arrays, self._returns)]
                for block in self._blocks
            ]
            self.is_watched = True

    def follow_episodes(self, index: int, now: float) -> None:
        """Goes on with what does not stand where outcomes are made."""
        if len(self.waits) > MAX_WAITS:
            self._sort()
        self.is_watched &= now <= self._watched_until
        if not self.is_watched:
            return
        reward, terminated, truncated, status, returns = self._views[index]
        returns += reward
        ended = (terminated | truncated).tobytes()
        # Few calls: around a simulation each costs more than it seems.
        place, steps = ended.find(1), self.steps[index]
        start = self._blocks[index].start
        while place >= 0:
            begun, is_valid = self._begun[start + place], status.item(place) == _OK
            if begun is not None and is_valid:
                self.num_episodes += 1
                told = self.num_episodes, start + place, returns.item(place)
                self.episodes.append((*told, steps - begun))
            returns[place] = 0.0
            self._begun[start + place] = steps + (self._first_step if is_valid else 0)
            place = ended.find(1, place + 1)

    def _sort(self) -> Array:
        """Counts what has taken how long; returns all such counts, behind their sum.

        Another thread may do so, to look at the pool: what it swaps, it swaps at once.
        """
        waits, self.waits = self.waits, []
        if waits:
            places = np.bincount(np.searchsorted(BOUNDS, waits), None, len(BOUNDS) + 1)
            self._sorted += np.append(int(1e9 * sum(waits)), places)
        return self._sorted

    def running_return(self, row: int) -> float | None:
        """Returns the rewards of a row's episode, if they were added up."""
        is_known = self.is_watched and self._begun[row] is not None
        return float(self._returns[row]) if is_known else None

    @property
    def num_env_steps(self) -> int:
        """Rows that came from the envs, and are valid."""
        sizes = (len(block.rows) for block in self._blocks)
        return sum(map(int.__mul__, self.steps, sizes)) - self.invalid[Status.ENV_ERROR]

    @property
    def counts(self) -> Counts:
        """All of it, to be added to that of other pools."""
        cells = np.zeros(RESET_CELL + NUM_CELLS, np.int64)
        if (slab := self.slab) is not None:  # which another thread may let go of
            cells = slab.heartbeats.sum(0).clip(0, _MOST)
        rows = [self.num_env_steps, *self.invalid[1:]]
        steps, resets = (cells[at : at + NUM_CELLS] for at in (STEP_CELL, RESET_CELL))
        return np.concatenate(
            [[self.restarts], rows, self.faults, self._sort(), steps, resets]
        )

    def status(self, most_episodes: int, **known: Any) -> LeaseStatus:
        """Returns all of it for one lease, with fields that others know.

        There is room for so many of the last episodes, and for as many recoveries.
        """
        found = status_fields(self.counts)
        del found["resets"], found["reset_seconds"]
        env_seconds = found.pop("env_step_seconds").sum
        return LeaseStatus(
            **found,
            env_seconds=env_seconds,
            num_episodes=self.num_episodes,
            episodes=tuple(self.episodes)[-most_episodes:],
            num_recoveries=self.num_recoveries,
            recoveries=tuple(self.recoveries)[-most_episodes:],
            **known,
        )


def add(all_counts: Iterable[Counts]) -> Counts:
    """Returns what several pools have counted together."""
    total: Counts = np.sum([np.zeros(_EDGES[-1], np.int64), *all_counts], 0)
    return total.clip(0, _MOST)


def status_fields(counts: Counts) -> dict[str, Any]:
    """Returns counts as fields of a `ServerStatus`; a `LeaseStatus` has less."""
    cells = counts.tolist()
    parts = [cells[start:stop] for start, stop in pairwise(_EDGES)]
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
