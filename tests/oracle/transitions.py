"""The transition function of `LedgerEnv`, for many rows at once."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tests.oracle.journal import Array
from tests.oracle.ledger_env import HASH_FACTOR, HASH_TERM

#: Columns of an observation.
SEED: Final = 0
EPISODE: Final = 1
STEP: Final = 2
HASH: Final = 3


class Transition(NamedTuple):
    """The expected result of a step: observations `[n, 4]`, other arrays `[n]`.

    Attributes:
      observation: The observation returned to the caller; if a new episode was started,
      its first observation.
      reward: float64; equals the action, or 0 if the step reset the env.
      final_observation: The last observation of the episode; only meaningful where the
      episode ended.
      is_applied: bool; whether the action was applied; False if the step reset the env.
      has_ended: bool; whether the env must be reset before its next step.
    """

    observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: Array
    is_applied: Array
    has_ended: Array


def advance(
    before: Array, actions: Array, has_ended: Array, length: int, *, same_step: bool
) -> Transition:
    """Return the expected result of a step.

    Args:
      before: int64 `[n, 4]`; the previous observations.
      actions: int64 `[n]`.
      has_ended: bool `[n]`; whether the episode has ended, so that the step resets the
      env.
      length: Number of steps in an episode.
      same_step: Whether an env is reset in the step that ends its episode.
    """
    final = before.copy()
    final[:, STEP] += 1
    # int64 arrays wrap around, as `ledger_hash` does.
    final[:, HASH] = final[:, HASH] * HASH_FACTOR + actions + HASH_TERM
    reward = actions.astype(np.float64)
    is_over = final[:, STEP] >= length
    if has_ended.any():
        final[has_ended] = next_episode(before[has_ended])
        reward[has_ended] = 0.0
        is_over &= ~has_ended
    observation = final
    if same_step and is_over.any():
        observation = final.copy()
        observation[is_over] = next_episode(final[is_over])
    is_termination = final[:, EPISODE] % 2 == 0
    return Transition(
        observation,
        reward,
        is_over & is_termination,
        is_over & ~is_termination,
        final,
        ~has_ended,
        np.zeros(len(before), np.bool_) if same_step else is_over,
    )


def next_episode(observation: Array) -> Array:
    """Return the observations after a reset without a seed."""
    observation = observation.copy()
    observation[:, EPISODE] += 1
    observation[:, STEP] = 0
    return observation
