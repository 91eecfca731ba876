"""How long it takes from a fault to the next valid row, for each row that it hits."""

from __future__ import annotations

from typing import Final

import numpy as np

from envserve.slab import Status
from tests.oracle.journal import Array
from tests.oracle.ledger import LOSSES

#: Statuses, by number, after which a row's next valid one ends what has befallen it.
_ENDS_IT: Final = np.isin(np.arange(256), [*LOSSES, Status.LATE])


class RecoveryTimes:
    """Clocks that start with a fault and stop with a valid row after its loss.

    A thread that makes faults may call `strike` while another one calls `note`, but not
    for rows that are open.

    Attributes:
      seconds: What the clocks have shown, one for each row and fault.
    """

    def __init__(self, num_envs: int) -> None:
        self.seconds: list[float] = []
        self._since = np.full(num_envs, np.inf)
        self._has_ended = np.zeros(num_envs, np.bool_)

    def strike(self, rows: Array, now: float) -> None:
        self._since[rows] = now

    def retract(self, rows: Array) -> None:
        """Stops clocks for nothing: the fault has not happened."""
        self._since[rows] = np.inf

    def is_open(self, rows: Array | None = None) -> bool:
        since = self._since if rows is None else self._since[rows]
        return bool(np.isfinite(since).any())

    def note(
        self, status: Array, began: float, now: float, rows: Array | None = None
    ) -> None:
        """Looks at what a call gave.

        Args:
          status: uint8 `[n]`.
          began: When the call began; that is when a fault that nobody announced may
            have happened at the earliest.
          now: When it ended.
          rows: int64 `[n]`; which rows; None for all.
        """
        if rows is None:
            if not status.any() and not np.isfinite(self._since).any():
                return
            rows = np.arange(len(self._since))
        has_started = np.isfinite(self._since[rows])
        new = rows[(status != Status.OK) & ~has_started]
        self._since[new] = began
        self._has_ended[rows] |= _ENDS_IT[status]
        back = rows[(status == Status.OK) & self._has_ended[rows]]
        self.seconds += (now - self._since[back]).tolist()
        self._since[back] = np.inf
        self._has_ended[back] = False
