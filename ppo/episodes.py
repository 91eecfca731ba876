"""Completed episodes and lost steps, found in a sequence of rollouts."""

from typing import NamedTuple

import numpy as np

from ppo.errors import EnvsLostError
from ppo.simulate import Rollout

__all__ = ["Episode", "EpisodeTracker", "LostSteps"]

_FEW_VALID = 0.1
_MAX_POOR_ITERATIONS = 10


class Episode(NamedTuple):
    """One complete episode."""

    env_index: int
    total_reward: float
    length: int


class EpisodeTracker:
    """Sums rewards per env across rollouts.

    An episode with a step that is not valid counts as nothing: what it would have
    earned is unknown.

    Attributes:
        lost_in_a_row: int64 `[num_envs]`; episodes that an env lost since it last
            completed one.
    """

    def __init__(self, num_envs: int) -> None:
        self._total_reward = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._is_spoiled = np.zeros(num_envs, np.bool_)
        self.lost_in_a_row = np.zeros(num_envs, np.int64)

    def add(self, rollout: Rollout) -> list[Episode]:
        """Take in the next rollout; returns its completed episodes in order of time."""
        episodes = []
        ends = rollout.done
        for step in range(len(ends)):
            valid = rollout.valid[step]
            self._total_reward += np.where(valid, rollout.reward[step], 0.0)
            self._length += valid
            self._is_spoiled |= ~valid
            for env_index in np.flatnonzero(ends[step]):
                self.lost_in_a_row[env_index] += 1
                if not self._is_spoiled[env_index]:
                    self.lost_in_a_row[env_index] = 0
                    episodes.append(
                        Episode(
                            int(env_index),
                            float(self._total_reward[env_index]),
                            int(self._length[env_index]),
                        )
                    )
                self._total_reward[env_index] = 0.0
                self._length[env_index] = 0
                self._is_spoiled[env_index] = False
        return episodes


class LostSteps:
    """Counts the steps that failed envs cost, and tells when going on is no use.

    Attributes:
        total: steps lost so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._poor_iterations = 0

    def add(self, lost: int, steps: int) -> None:
        """Take in an iteration of so many steps, of which so many were lost.

        Raises:
            EnvsLostError: all steps were lost, or more than 90 % in each of the last
                10 iterations.
        """
        self.total += lost
        is_poor = steps - lost < _FEW_VALID * steps
        self._poor_iterations = self._poor_iterations + 1 if is_poor else 0
        if lost == steps or self._poor_iterations >= _MAX_POOR_ITERATIONS:
            raise EnvsLostError(
                f"Expected envs that mostly work, but {100 * lost / steps:.0f} % of "
                f"the last iteration's {steps:,} steps were lost; see the log for why "
                "they fail."
            )
