"""What a caller knows of its rows, and whether a result can be true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envserve.chaos.sessions.ledger import (
    Ledger,
    Observation,
    Violation,
    apply,
    endings,
)
from envserve.lane import Block
from envserve.slab import Rows, Status

__all__ = ["RowView", "end_steps"]

Array = np.ndarray[Any, Any]

_OK = int(Status.OK)
_PENDING = int(Status.PENDING)
_LATE = int(Status.LATE)
_ENV_ERROR = int(Status.ENV_ERROR)
_SERVER_LOST = int(Status.SERVER_LOST)


class RowView:
    """A row as its caller sees it.

    Attributes:
      observation: The last one; None before the first reset, and after an error.
      pending: Actions that came back PENDING since.
    """

    def __init__(self, ledger: Ledger, seed: int, row: int, may_give_up: bool) -> None:
        """Starts without an episode.

        Args:
          ledger: What was asked and done.
          seed: Root seed of all leases of its session.
          row: Which one it is.
          may_give_up: Whether the session may leave a lease that is not over.
        """
        self._may_give_up = may_give_up
        self.observation: Observation | None = None
        self._ledger = ledger
        self._seed = seed
        self._row = row
        self._last_episode = 0
        self.pending: list[int] = []

    def begin(self, observation: Observation) -> None:
        """Takes the first observation of an episode, never seen before."""
        number, step, _ = observation
        episode = self._ledger.episode(number)
        if step or (episode.seed, episode.row) != (self._seed, self._row):
            raise Violation(
                f"row {self._row} of seed {self._seed} was reset, and got "
                f"{self._ledger.place(observation)} of seed {episode.seed}"
            )
        if number <= self._last_episode:
            raise Violation(f"row {self._row} went back to episode {number}")
        self._last_episode = number
        self.pending.clear()
        self.observation = observation

    def end_step(
        self,
        action: int,
        observation: Observation,
        reward: float,
        is_terminated: bool,
        is_truncated: bool,
        status: int,
        final: Array,
    ) -> bool:
        """Takes the result of a step; tells whether it was valid."""
        last = self.observation
        if last is None:
            raise Violation(f"row {self._row} was stepped without an episode")
        if status in (_OK, _LATE):
            expected = apply(last, action)
            if status == _LATE:
                expected = self._late(last, action, observation, final)
            elif action < 0:
                raise Violation("an action was executed that no env may get")
            elif reward != action:
                raise Violation(f"expected the reward of {action}; got {reward}")
            flags = endings(expected)
            if flags != (is_terminated, is_truncated):
                raise Violation(f"{flags} became {is_terminated, is_truncated}")
            if True not in flags:
                self._same(observation, expected)
                self.observation = observation
                self.pending.clear()
            else:
                self._same(final.tolist(), expected)
                self._begin_next(last, observation, True)
            return status == _OK
        if reward or is_terminated or is_truncated is (status == _PENDING):
            raise Violation(
                f"a row of status {status} has reward {reward} and ends as "
                f"{is_terminated, is_truncated}"
            )
        if status == _PENDING:
            self._same(observation, last)
            self.pending.append(action)
            return False
        self._same(final.tolist(), last)
        if status == _SERVER_LOST:
            is_lost = self._may_give_up or self._ledger.is_over(last[0])
        else:
            is_lost = self._ledger.is_lost(last[0])
        if not is_lost:
            raise Violation(f"{self._ledger.place(last)} was not lost")
        self._begin_next(last, observation, status != _SERVER_LOST)
        return False

    def _late(
        self, last: Observation, action: int, observation: Observation, final: Array
    ) -> Observation:
        """Returns what one of the actions has led to that were not answered."""
        seen = (observation, final.tolist())
        for candidate in (*self.pending, action):
            expected = apply(last, candidate)
            if expected in seen:
                return expected
        raise Violation(f"{observation} does not go on from {last}")

    def _begin_next(
        self, last: Observation, observation: Observation, is_same_pool: bool
    ) -> None:
        self.begin(observation)
        old, new = self._ledger.episode(last[0]), self._ledger.episode(observation[0])
        if (old.pool == new.pool) is not is_same_pool:
            raise Violation(f"row {self._row} went from {old} to {new}")

    def _same(self, observation: Observation, expected: Observation) -> None:
        if observation != expected:
            raise Violation(
                f"row {self._row}: expected {expected}, {self._ledger.place(expected)};"
                f" got {observation}"
            )


def end_steps(
    views: Sequence[RowView], block: Block, actions: Sequence[int], rows: Rows
) -> int:
    """Takes the result of a block's step; returns how many rows are valid."""
    part = slice(block.start, block.stop)
    observations = rows.observation[0][part].tolist()
    rewards = rows.reward[part].tolist()
    terminated = rows.terminated[part].tolist()
    truncated = rows.truncated[part].tolist()
    statuses = rows.status[part].tolist()
    final = rows.final_observation[0]
    num_valid = 0
    for i, row in enumerate(range(block.start, block.stop)):
        num_valid += views[row].end_step(
            actions[i],
            observations[i],
            rewards[i],
            terminated[i],
            truncated[i],
            statuses[i],
            final[row],
        )
    return num_valid
