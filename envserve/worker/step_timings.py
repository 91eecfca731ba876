"""Histograms of step and reset durations in shared memory, without locks.

Each worker has its own cells in the slab, behind its heartbeat. Only the worker writes
its cells; the pool may read them at any time. The counts persist when the worker's
process is replaced.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from envserve.worker.unpatched import perf_counter_ns

#: Upper bounds of the buckets in seconds; one more bucket counts longer durations.
BOUNDS: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BOUNDS_NS: Final = [int(1e9 * bound) for bound in BOUNDS]
#: Number of cells of a histogram: the sum of all durations in nanoseconds, then the
#: count of each bucket.
NUM_CELLS: Final = 2 + len(BOUNDS)
#: Index of the step histogram's first cell, which contains the sum of the durations.
STEP_CELL: Final = 8
#: Index of the step histogram's first count.
_STEP_COUNTS: Final = STEP_CELL + 1
#: Index of the reset histogram's first cell.
RESET_CELL: Final = 32
#: Index of the cell that contains the total duration of resets in the main thread, in
#: nanoseconds. The durations of steps exclude these resets, which may run in a step.
_INLINE_CELL: Final = 31


def start_time(cells: memoryview | None = None) -> int:
    """Return a start time for `record_resets` or, if cells are given, `record_step`."""
    return perf_counter_ns() - (0 if cells is None else cells[_INLINE_CELL])


def record_step(cells: memoryview, started_at: int, num_rows: int) -> None:
    """Record a step of `num_rows` rows, without the duration of resets within it."""
    duration_ns = perf_counter_ns() - cells[_INLINE_CELL] - started_at
    cells[STEP_CELL] += duration_ns
    cells[_STEP_COUNTS + bisect_left(_BOUNDS_NS, duration_ns // num_rows)] += num_rows


def record_resets(cells: memoryview, started_at: int, num_rows: int) -> None:
    """Record a reset of `num_rows` rows."""
    duration_ns = perf_counter_ns() - started_at
    cells[_INLINE_CELL] += duration_ns
    cells[RESET_CELL] += duration_ns
    cells[RESET_CELL + 1 + bisect_left(_BOUNDS_NS, duration_ns // num_rows)] += num_rows


def move_resets(source: memoryview, target: memoryview) -> None:
    """Move the histogram of resets from one array of cells into another."""
    for cell in range(RESET_CELL, RESET_CELL + NUM_CELLS):
        if source[cell]:
            target[cell] += source[cell]
            source[cell] = 0
