"""Time from a fault to the next valid row, for each row that the fault affects."""

from __future__ import annotations

from typing import Final

import numpy as np

from envserve.slab import Status
from tests.oracle.journal import Array
from tests.oracle.ledger import LOSSES

#: By status number: whether the row's next valid result completes its recovery.
_COMPLETES_RECOVERY: Final = np.isin(np.arange(256), [*LOSSES, Status.LATE])


class RecoveryTimes:
    """Measures the time from a fault until its rows are valid again.

    A thread that injects faults may call `start` while another one calls `update`, but
    not for rows that are recovering.

    Attributes:
      seconds: The measured times, one per row and fault.
    """

    def __init__(self, num_envs: int) -> None:
        self.seconds: list[float] = []
        self._since = np.full(num_envs, np.inf)
        self._has_ended = np.zeros(num_envs, np.bool_)

    def start(self, rows: Array, now: float) -> None:
        self._since[rows] = now

    def cancel(self, rows: Array) -> None:
        """Discard running measurements because the fault did not happen."""
        self._since[rows] = np.inf

    def is_recovering(self, rows: Array | None = None) -> bool:
        since = self._since if rows is None else self._since[rows]
        return bool(np.isfinite(since).any())

    def update(
        self, status: Array, began: float, now: float, rows: Array | None = None
    ) -> None:
        """Process the result of a call.

        Args:
          status: uint8 `[n]`.
          began: When the call began; the earliest time of faults without a `start`.
          now: When the call ended.
          rows: int64 `[n]`; the rows of the result; None for all.
        """
        if rows is None:
            if not status.any() and not np.isfinite(self._since).any():
                return
            rows = np.arange(len(self._since))
        has_started = np.isfinite(self._since[rows])
        new = rows[(status != Status.OK) & ~has_started]
        self._since[new] = began
        self._has_ended[rows] |= _COMPLETES_RECOVERY[status]
        back = rows[(status == Status.OK) & self._has_ended[rows]]
        self.seconds += (now - self._since[back]).tolist()
        self._since[back] = np.inf
        self._has_ended[back] = False
