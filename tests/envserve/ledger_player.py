"""Plays batches of ledgers as fast as their results come, every row checked."""

from __future__ import annotations

import numpy as np

from envserve.client import BatchEnv
from envserve.testing import Ledger

SEED = 3
#: Longest that a call may take, on a machine that is busy with other things.
LONGEST_SECONDS = 60.0
#: What a server must allow for ledgers with journals.
LEDGER_OPENINGS = [
    *("--allow-kwarg", "journal", "--allow-kwarg", "step_seconds"),
    *("--allow-kwarg", "length"),
]


class Player:
    """A batch of `LedgerEnv`, and its ledger.

    Attributes:
      batch: As it was given, with all envs reset.
      ledger: Has seen all that the batch gave.
    """

    def __init__(
        self,
        batch: BatchEnv,
        random: np.random.Generator,
        root_seed: int | None = SEED,
    ) -> None:
        self.batch = batch
        self.ledger = Ledger(batch.num_envs, root_seed)
        self._random = random
        self._actions = np.zeros(batch.num_envs, np.int64)
        self.ledger.reset(batch.reset())

    def step(self, num_steps: int) -> None:
        """Steps all rows together."""
        for _ in range(num_steps):
            actions = self._draw(np.arange(self.batch.num_envs))
            with self.ledger.within(LONGEST_SECONDS):
                result = self.batch.step(actions)
            self.ledger.step(actions, result)

    def send_and_receive(self, num_steps: int) -> None:
        """Steps every row so often, each block as soon as its last result is there."""
        left = np.full(self.batch.num_envs, num_steps)
        self.batch.send(self._draw(np.arange(self.batch.num_envs)))
        while self.batch.num_out:
            with self.ledger.within(LONGEST_SECONDS):
                rows, result = self.batch.recv()
            self.ledger.step(self._actions[rows], result, rows)
            left[rows] -= 1
            for block in self.batch.blocks:
                if np.isin(block, rows).all() and left[block].all():
                    self.batch.send(self._draw(block), block)

    def check_nothing_was_seen(self, journal: object) -> None:
        """Checks that every row was valid, and every action applied once."""
        self.ledger.finish(str(journal))
        assert self.ledger.num_valid == self.ledger.num_rows
        assert self.ledger.num_unseen == 0

    def _draw(self, rows: np.ndarray) -> np.ndarray:
        self._actions[rows] = self._random.integers(0, 1000, len(rows))
        return self._actions[rows]
