"""Rows that are made up, where no env has answered.

A lost episode is one row that is truncated, when its env is back. Until then the
caller may get rows that are pending: in them nothing has happened.
"""

from __future__ import annotations

import numpy as np

from envserve.slab import Rows, Status

__all__ = [
    "keep_last_observation",
    "restore_last_observation",
    "write_lost",
    "write_pending",
]


def keep_last_observation(rows: Rows, part: slice) -> None:
    """Makes the last observations the final ones, before new ones are written.

    They may be of a step that was never answered. What is not finite becomes 0, since
    nobody has checked it.
    """
    for final, last in zip(rows.final_observation, rows.observation, strict=True):
        if last.dtype.kind == "f":
            last[part] = np.where(np.isfinite(last[part]), last[part], 0)
        final[part] = last[part]


def restore_last_observation(rows: Rows, part: slice) -> None:
    """Makes the final observations, that were kept, the last ones again."""
    for final, last in zip(rows.final_observation, rows.observation, strict=True):
        last[part] = final[part]


def write_lost(rows: Rows, part: slice, status: Status) -> None:
    """Ends the episodes of some rows; their observations are the next ones already."""
    rows.reward[part] = 0.0
    rows.terminated[part] = False
    rows.truncated[part] = True
    rows.status[part] = status


def write_pending(rows: Rows, part: slice) -> None:
    """Has nothing happen in some rows; their observations stay as they are."""
    rows.reward[part] = 0.0
    rows.terminated[part] = False
    rows.truncated[part] = False
    rows.status[part] = Status.PENDING
