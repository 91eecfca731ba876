"""A batch driver that measures recovery times and fills the result of a trial."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, Self

from envserve.client import BatchEnv, StepResult
from tests.chaos.recovery_times import RecoveryTimes
from tests.chaos.trial import Trial
from tests.oracle.batch_driver import MAX_CALL_SECONDS, BatchDriver
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger

#: Actions from this number on are not drawn; cases use them to trigger breakdowns.
FIRST_BREAKDOWN_ACTION: Final = 900


class Driver(BatchDriver):
    """Steps a batch for a trial; a context manager that adds its counts to the result.

    Attributes:
      recovery_times: Measured recovery times of the rows.
      fault_texts: Number of faults by the last line of their text.
    """

    num_actions = FIRST_BREAKDOWN_ACTION

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
