"""Rows of a step's result, with checked shapes, and the error of a `Ledger`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from envserve.client import StepResult
from tests.oracle.journal import Array


class LedgerError(AssertionError):
    """A row contradicts the reference model, or a call took too long."""

    def __init__(self, message: str, env_index: int | None = None) -> None:
        super().__init__(message)
        self.env_index = env_index


class ResultRows(NamedTuple):
    """Rows of a step's result, with their actions; `rows` are their batch indices."""

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
        """Create rows from a result; raise LedgerError if a shape is wrong."""
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
