"""A wrong transition made on purpose, to see that a case would notice one."""

from __future__ import annotations

import numpy as np

from envserve.client import StepResult
from envserve.slab import Status


class Plant:
    """Spoils one result: a valid row gets the reward of another action.

    Attributes:
      is_planted: Whether it has happened.
    """

    def __init__(self, after_faults: int = 1) -> None:
        self.is_planted = False
        self._after_faults = after_faults

    def spoil(self, result: StepResult, num_faults: int) -> StepResult:
        valid = np.flatnonzero(result.status == Status.OK)
        if self.is_planted or num_faults < self._after_faults or not valid.size:
            return result
        self.is_planted = True
        reward = result.reward.copy()
        reward[valid[0]] += 1.0
        return result._replace(reward=reward)
