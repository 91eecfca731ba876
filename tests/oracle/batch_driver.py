"""Steps a batch of ledger envs with random actions and verifies every row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from envserve.client import BatchEnv, StepResult
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger

#: Time limit of a call in seconds; generous, because machines may be busy.
MAX_CALL_SECONDS: Final = 60.0


class BatchDriver:
    """Steps a batch and passes every result to a ledger.

    Attributes:
      batch: The batch; all its envs have been reset.
      ledger: The ledger that verifies the results.
      random: The generator of actions.
      actions: int64 `[num_envs]`; the last action sent to each row.
    """

    #: Random actions are from 0 to `num_actions - 1`.
    num_actions: ClassVar[int] = 1000

    def __init__(
        self,
        batch: BatchEnv,
        ledger: Ledger,
        random: np.random.Generator,
        max_call_seconds: float = MAX_CALL_SECONDS,
    ) -> None:
        """Reset all envs; `max_call_seconds` is the time limit of each call."""
        self.batch = batch
        self.ledger = ledger
        self.random = random
        self.actions = np.zeros(batch.num_envs, np.int64)
        self._sent_at = np.zeros(batch.num_envs)
        self._max_call_seconds = max_call_seconds
        with ledger.within(max_call_seconds):
            observation = batch.reset()
        self.check_reset(observation)

    def draw(self, num_rows: int | None = None) -> Array:
        num_rows = self.batch.num_envs if num_rows is None else num_rows
        return self.random.integers(0, self.num_actions, num_rows)

    def step(self, actions: Array | None = None) -> StepResult:
        self.actions[:] = self.draw() if actions is None else actions
        began = time.monotonic()
        with self.ledger.within(self._max_call_seconds):
            result = self.batch.step(self.actions)
        self.check(result, None, began)
        return result

    def send(self, rows: Array, *, together: bool = False) -> None:
        """Send random actions to rows, which must form whole blocks."""
        self.actions[rows] = self.draw(len(rows))
        self._sent_at[rows] = time.monotonic()
        self.batch.send(self.actions[rows], rows, together=together)

    def receive(
        self,
        timeout: float | None = None,
        min_envs: int | None = None,
        env_indices: Array | None = None,
    ) -> tuple[Array, StepResult]:
        """Receive results, by default those of the first block that finishes.

        Args:
          timeout: Time limit in seconds; None for no limit.
          min_envs: Minimum number of rows to receive.
          env_indices: The rows to receive.

        Raises:
          EnvTimeout: No result arrived within `timeout` seconds.
        """
        with self.ledger.within(self._max_call_seconds):
            rows, result = self.batch.recv(min_envs, timeout, env_indices=env_indices)
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        self.check(result, rows, float(self._sent_at[rows].min()))
        return rows, result

    def receive_rest(self) -> None:
        while self.batch.num_in_flight:
            self.receive()

    def send_and_receive(self, num_steps: int) -> None:
        """Step all rows `num_steps` times; send each block again once received."""
        left = np.full(self.batch.num_envs, num_steps)
        self.send(np.arange(self.batch.num_envs))
        while self.batch.num_in_flight:
            rows, _ = self.receive()
            left[rows] -= 1
            for block in self.batch.blocks:
                if np.isin(block, rows).all() and left[block].all():
                    self.send(block)

    def check_reset(
        self,
        observation: Array,
        rows: Array | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        """Verify the result of a reset; see `Ledger.reset`."""
        self.ledger.reset(observation, rows, seeds)

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        """Verify the result of a call.

        Args:
          rows: The rows of the result; None for all.
          began: Monotonic time when the call started.
        """
        actions = self.actions if rows is None else self.actions[rows]
        self.ledger.step(actions, result, rows)
