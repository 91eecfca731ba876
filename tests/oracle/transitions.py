"""What a `LedgerEnv` must do with an action, for many rows at once."""

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
    """What a step gives; all `[n]` or `[n, 4]`.

    Attributes:
      observation: What the caller sees, the next episode's first one where there is.
      reward: float64; echoes the action.
      final_observation: The last of this episode; it has meaning where that has ended.
      is_applied: bool; False for an action that only has an ended env reset.
      has_ended: bool; whether the env must be reset before it can be stepped.
    """

    observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: Array
    is_applied: Array
    has_ended: Array


def advance(
    books: Array, actions: Array, has_ended: Array, length: int, *, same_step: bool
) -> Transition:
    """Returns what steps must give.

    Args:
      books: int64 `[n, 4]`; what the envs observe before.
      actions: int64 `[n]`.
      has_ended: bool `[n]`; rows in which the step is the reset of an ended episode.
      length: Steps of an episode.
      same_step: Whether an env is reset in the step that ends its episode.
    """
    final = books.copy()
    final[:, STEP] += 1
    # int64 arrays wrap around, as `ledger_hash` does.
    final[:, HASH] = final[:, HASH] * HASH_FACTOR + actions + HASH_TERM
    reward = actions.astype(np.float64)
    is_over = final[:, STEP] >= length
    if has_ended.any():
        final[has_ended] = next_episode(books[has_ended])
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
        np.zeros(len(books), np.bool_) if same_step else is_over,
    )


def next_episode(books: Array) -> Array:
    """Returns what envs with these books observe after a reset without a seed."""
    books = books.copy()
    books[:, EPISODE] += 1
    books[:, STEP] = 0
    return books
