"""Plays a batch of ledgers with actions that are drawn, every row checked."""

from __future__ import annotations

import os
import time
from typing import ClassVar, Final

import numpy as np

from envserve.client import BatchEnv, StepResult
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger

#: Seconds that a call may take, on a machine that is busy with other things.
LONGEST_CALL: Final = 60.0


class BatchDriver:
    """A batch of ledgers and its books.

    Attributes:
      batch: As it was given, with all envs reset.
      ledger: Has seen all that the batch gave.
      random: What actions are drawn from.
      actions: int64 `[num_envs]`; what each row was sent last.
    """

    #: Actions from here on are not drawn.
    num_actions: ClassVar[int] = 1000

    def __init__(
        self,
        batch: BatchEnv,
        ledger: Ledger,
        random: np.random.Generator,
        longest_call: float = LONGEST_CALL,
    ) -> None:
        """Resets all envs; no call may take longer than so many seconds."""
        self.batch = batch
        self.ledger = ledger
        self.random = random
        self.actions = np.zeros(batch.num_envs, np.int64)
        self._sent_at = np.zeros(batch.num_envs)
        self._longest_call = longest_call
        with ledger.within(longest_call):
            observation = batch.reset()
        ledger.reset(observation)

    def draw(self, num_rows: int | None = None) -> Array:
        num_rows = self.batch.num_envs if num_rows is None else num_rows
        return self.random.integers(0, self.num_actions, num_rows)

    def step(self, actions: Array | None = None) -> StepResult:
        self.actions[:] = self.draw() if actions is None else actions
        began = time.monotonic()
        with self.ledger.within(self._longest_call):
            result = self.batch.step(self.actions)
        self.check(result, None, began)
        return result

    def send(self, rows: Array, *, together: bool = False) -> None:
        """Sends actions to rows of whole blocks."""
        self.actions[rows] = self.draw(len(rows))
        self._sent_at[rows] = time.monotonic()
        self.batch.send(self.actions[rows], rows, together=together)

    def receive(
        self,
        timeout: float | None = None,
        min_envs: int | None = None,
        env_indices: Array | None = None,
    ) -> tuple[Array, StepResult]:
        """Waits for the first block that was sent, or for more, or for these rows.

        Raises:
          EnvTimeout: There is none after so many seconds.
        """
        with self.ledger.within(self._longest_call):
            rows, result = self.batch.recv(min_envs, timeout, env_indices=env_indices)
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        self.check(result, rows, float(self._sent_at[rows].min()))
        return rows, result

    def receive_rest(self) -> None:
        while self.batch.num_in_flight:
            self.receive()

    def send_and_receive(self, num_steps: int) -> None:
        """Steps every row so often, each block as soon as its last result is there."""
        left = np.full(self.batch.num_envs, num_steps)
        self.send(np.arange(self.batch.num_envs))
        while self.batch.num_in_flight:
            rows, _ = self.receive()
            left[rows] -= 1
            for block in self.batch.blocks:
                if np.isin(block, rows).all() and left[block].all():
                    self.send(block)

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        """Checks what has come for rows, None for all, of a call that began then."""
        actions = self.actions if rows is None else self.actions[rows]
        self.ledger.step(actions, result, rows)

    def check_nothing_was_seen(self, journal: str | os.PathLike[str]) -> None:
        """Checks that every row was valid, and every action applied once."""
        self.ledger.finish(journal)
        assert self.ledger.num_valid == self.ledger.num_rows
        assert self.ledger.num_unseen == 0
