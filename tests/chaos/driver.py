"""A driver that times what comes of faults, and adds up for a trial."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, Self

from envserve.client import BatchEnv, StepResult
from tests.chaos.recovery_times import RecoveryTimes
from tests.chaos.trial import Trial
from tests.oracle.batch_driver import LONGEST_CALL, BatchDriver
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger

#: Actions from here on are left to cases, which let envs break down at them.
FIRST_TRAP: Final = 900


class Driver(BatchDriver):
    """A batch and its ledger; a context manager that adds up in the trial's result.

    Attributes:
      recoveries: Clocks of its rows.
      fault_texts: How often each last line of a fault's text has come.
    """

    num_actions = FIRST_TRAP

    def __init__(
        self,
        trial: Trial,
        batch: BatchEnv,
        ledger: Ledger,
        longest_call: float = LONGEST_CALL,
    ) -> None:
        super().__init__(batch, ledger, trial.random, longest_call)
        self.recoveries = RecoveryTimes(batch.num_envs)
        self.fault_texts: Counter[str] = Counter()
        self._trial = trial

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        """Checks rows, spoiled if that is planted, and looks for faults in them."""
        now = time.monotonic()
        super().check(self._trial.spoil(result), rows, began)
        self.recoveries.note(result.status, began, now, rows)
        for info in result.infos.values():
            if "fault" in info:
                text = str(info["fault"]["text"]).strip()
                self.fault_texts[text.rpartition("\n")[2]] += 1
        self._trial.check_time()

    def settle(self) -> None:
        """Steps on until every row that was hit has been valid again."""
        while self.recoveries.is_open():
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Adds what was counted, also of a run that has failed, to the result."""
        result, ledger = self._trial.result, self.ledger
        result.row_steps += ledger.num_rows
        result.padding += ledger.num_padding
        result.late += ledger.num_late
        result.losses.update({s.name: n for s, n in ledger.losses.items()})
        result.seconds += self.recoveries.seconds
