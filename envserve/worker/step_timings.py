"""Durations, counted by bounds in cells that others can read: no lock, no message.

A worker has its cells in the slab, behind its heartbeat. They go on counting when its
process is replaced, and are nobody else's to write.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter_ns
from typing import Final

__all__ = ["BOUNDS", "NUM_CELLS", "RESET_CELL", "STEP_CELL"]
__all__ += ["begin", "move", "note_resets", "note_step"]

#: Upper bounds in seconds; what is longer than all is counted behind the last.
BOUNDS: Final = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BOUNDS_NS: Final = [int(1e9 * bound) for bound in BOUNDS]
#: Of one histogram: the sum in nanoseconds, then the counts.
NUM_CELLS: Final = 2 + len(BOUNDS)
#: Where in a worker's cells those of its steps begin, and those of resets.
STEP_CELL: Final = 8
_STEP_COUNTS: Final = STEP_CELL + 1
RESET_CELL: Final = 32
#: Where the nanoseconds of resets are summed that no thread has made beside steps.
_INLINE_CELL: Final = 31


def begin(cells: memoryview | None = None) -> int:
    """Returns an instant for `note_resets`; with cells, one for `note_step`."""
    return perf_counter_ns() - (0 if cells is None else cells[_INLINE_CELL])


def note_step(cells: memoryview, began_at: int, num_rows: int) -> None:
    """Counts the step of so many rows: what took long since, but for resets."""
    spent = perf_counter_ns() - cells[_INLINE_CELL] - began_at
    cells[STEP_CELL] += spent
    cells[_STEP_COUNTS + bisect_left(_BOUNDS_NS, spent // num_rows)] += num_rows


def note_resets(cells: memoryview, began_at: int, num_rows: int) -> None:
    """Counts the reset of so many rows."""
    spent = perf_counter_ns() - began_at
    cells[_INLINE_CELL] += spent
    cells[RESET_CELL] += spent
    cells[RESET_CELL + 1 + bisect_left(_BOUNDS_NS, spent // num_rows)] += num_rows


def move(source: memoryview, target: memoryview) -> None:
    """Adds resets that were counted in some cells to others, and forgets them there."""
    for cell in range(RESET_CELL, RESET_CELL + NUM_CELLS):
        if source[cell]:
            target[cell] += source[cell]
            source[cell] = 0
