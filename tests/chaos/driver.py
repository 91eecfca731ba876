"""A batch driver that measures recovery times and adds its counts to a result."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, Self

import numpy as np

from envserve.client import BatchEnv, StepResult
from envserve.slab import Status
from tests.chaos.trial import Trial
from tests.oracle.batch_driver import MAX_CALL_SECONDS, BatchDriver
from tests.oracle.journal import Array
from tests.oracle.ledger import LOSSES, Ledger

#: Actions from this number upwards are never drawn at random. Cases use them to trigger
#: failures.
FIRST_FAILURE_ACTION: Final = 900
#: By status number: whether the row has recovered when its next result is valid.
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
          began: Monotonic time when the call began, which also counts as the start of
          faults for which `start` was not called.
          now: Monotonic time when the call ended.
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


class Driver(BatchDriver):
    """Steps a batch for a trial; a context manager that adds its counts to the result.

    Attributes:
      recovery_times: Measured recovery times of the rows.
      fault_texts: Number of faults, by the last line of the faults' texts.
    """

    num_actions = FIRST_FAILURE_ACTION

    def __init__(
        self,
        trial: Trial,
        batch: BatchEnv,
        ledger: Ledger,
        max_call_seconds: float = MAX_CALL_SECONDS,
    ) -> None:
        super().__init__(batch, ledger, trial.random, max_call_seconds)
        self.recovery_times = RecoveryTimes(batch.num_envs)
        self.fault_texts: Counter[str] = Counter()
        self._trial = trial

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        """Verify rows, after corrupting one if requested, and record faults."""
        now = time.monotonic()
        super().check(self._trial.corrupt(result), rows, began)
        self.recovery_times.update(result.status, began, now, rows)
        for info in result.infos.values():
            if "fault" in info:
                text = str(info["fault"]["text"]).strip()
                self.fault_texts[text.rpartition("\n")[2]] += 1
        self._trial.check_time()

    def settle(self) -> None:
        """Step until every affected row has been valid again."""
        while self.recovery_times.is_recovering():
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Add the counts to the result, even if the run failed."""
        result, ledger = self._trial.result, self.ledger
        result.row_steps += ledger.num_rows
        result.padding += ledger.num_padding
        result.late += ledger.num_late
        result.losses.update({s.name: n for s, n in ledger.losses.items()})
        result.seconds += self.recovery_times.seconds
