"""What a `Ledger` is given, and the error by which it says what is wrong with it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from envserve.client import StepResult
from tests.oracle.journal import Array


class LedgerError(AssertionError):
    """A row is not what the ledger says; or a call took too long."""

    def __init__(self, message: str, env_index: int | None = None) -> None:
        super().__init__(message)
        self.env_index = env_index


class ResultRows(NamedTuple):
    """Some rows of a step, with their actions; `rows` are those of the batch."""

    rows: Array
    actions: Array
    observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    final_observation: Array
    status: Array

    @classmethod
    def of(cls, rows: Array, actions: Array, result: StepResult) -> ResultRows:
        """Takes a whole step; raises LedgerError for an array of another shape."""
        n = len(rows)
        return cls(
            rows,
            check_shape("actions", actions, (n,)),
            check_shape("observation", result.observation, (n, 4)),
            check_shape("reward", result.reward, (n,)),
            check_shape("terminated", result.terminated, (n,)),
            check_shape("truncated", result.truncated, (n,)),
            check_shape("valid", result.valid, (n,)),
            check_shape("final observation", result.final_observation, (n, 4)),
            check_shape("status", result.status, (n,)),
        )

    def at(self, chosen: Array) -> ResultRows:
        return ResultRows(*(array[chosen] for array in self))


def check_shape(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    if np.shape(array) != shape:
        raise LedgerError(
            f"{name}: expected an array of shape {list(shape)}; "
            f"got {list(np.shape(array))}"
        )
    return array
