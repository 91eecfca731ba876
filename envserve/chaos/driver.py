"""Steps a batch of ledgers, has every row checked, and times what comes of faults."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final, Self

import numpy as np

from envserve.chaos.recoveries import Recoveries
from envserve.chaos.trial import Trial
from envserve.client import BatchEnv, StepResult
from envserve.testing import Ledger

__all__ = ["FIRST_TRAP", "LONGEST_CALL", "Driver"]

Array = np.ndarray[Any, Any]

#: Actions from here on are left to cases, which let envs break down at them.
FIRST_TRAP: Final = 900
#: Seconds that a call may take, whatever happens, if the case says nothing else.
LONGEST_CALL: Final = 60.0


class Driver:
    """A batch and its ledger; a context manager that adds up in the trial's outcome.

    Attributes:
      batch: The batch, reset.
      ledger: Has seen all that the batch gave.
      recoveries: Clocks of its rows.
      fault_texts: How often each last line of a fault's text has come.
      actions: int64 `[num_envs]`; what each row was sent last.
    """

    def __init__(
        self,
        trial: Trial,
        batch: BatchEnv,
        ledger: Ledger,
        longest_call: float = LONGEST_CALL,
    ) -> None:
        """Resets all envs."""
        self.batch = batch
        self.ledger = ledger
        self.recoveries = Recoveries(batch.num_envs)
        self.fault_texts: Counter[str] = Counter()
        self.actions = np.zeros(batch.num_envs, np.int64)
        self.sent_at = np.zeros(batch.num_envs)
        self._trial = trial
        self._longest_call = longest_call
        with ledger.within(longest_call):
            observation = batch.reset()
        ledger.reset(observation)

    def draw(self, num_rows: int | None = None) -> Array:
        """Returns actions at which nothing happens, for all rows or so many."""
        n = self.batch.num_envs if num_rows is None else num_rows
        return self._trial.random.integers(0, FIRST_TRAP, n)

    def step(self, actions: Array | None = None) -> StepResult:
        """Steps all rows, and checks them."""
        self._trial.check_time()
        actions = self.draw() if actions is None else actions
        self.actions[:] = actions
        began = time.monotonic()
        with self.ledger.within(self._longest_call):
            result = self.batch.step(actions)
        self._check(result, began, None)
        return result

    def send(self, rows: Array) -> None:
        """Sends actions to rows of whole blocks."""
        self.actions[rows] = self.draw(len(rows))
        self.sent_at[rows] = time.monotonic()
        self.batch.send(self.actions[rows], rows)

    def receive(self, timeout: float | None = None) -> tuple[Array, StepResult]:
        """Waits for the first block that was sent, and checks its rows.

        Raises:
          EnvTimeout: There is none after so many seconds.
        """
        self._trial.check_time()
        with self.ledger.within(self._longest_call):
            rows, result = self.batch.recv(timeout=timeout)
        self._check(result, float(self.sent_at[rows].min()), rows)
        return rows, result

    def receive_rest(self) -> None:
        """Receives all that is out."""
        while self.batch.num_out:
            self.receive()

    def check(self, actions: Array, result: StepResult, rows: Array) -> None:
        """Checks what a case has received by itself."""
        self.ledger.step(actions, self._trial.spoil(result), rows)

    def settle(self) -> None:
        """Steps on until every row that was hit has been valid again."""
        while self.recoveries.is_open():
            self.step()

    def _check(self, result: StepResult, began: float, rows: Array | None) -> None:
        now = time.monotonic()
        result = self._trial.spoil(result)
        actions = self.actions if rows is None else self.actions[rows]
        self.ledger.step(actions, result, rows)
        self.recoveries.note(result.status, began, now, rows)
        for info in result.infos.values():
            if "fault" in info:
                text = str(info["fault"]["text"]).strip()
                self.fault_texts[text.rpartition("\n")[2]] += 1

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Adds what was counted, also of a run that has failed, to the outcome."""
        outcome, ledger = self._trial.outcome, self.ledger
        outcome.row_steps += ledger.num_rows
        outcome.padding += ledger.num_padding
        outcome.late += ledger.num_late
        outcome.losses.update({s.name: n for s, n in ledger.losses.items()})
        outcome.seconds += self.recoveries.seconds
