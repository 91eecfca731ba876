"""Env seeds that do not depend on where an env runs.

The seed of an env is derived from the root seed, its row in the batch and the number of
times it has been rebuilt, not from the number of workers, lanes or servers.
"""

from __future__ import annotations

import numpy as np

MAX_ROOT_SEED = 2**63 - 1
#: Number that each new lease adds to the first incarnation of a client's envs, so that
#: seeds do not repeat. No env is rebuilt this often within one lease.
INCARNATIONS_PER_LEASE = 1 << 18


def draw_root_seed() -> int:
    """Return a root seed in [0, 2**63) from the operating system's entropy."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) >> 1


def env_seed(root_seed: int, env_index: int, incarnation: int) -> int:
    """Return the seed of one incarnation of one env.

    Args:
      root_seed: Seed of the whole batch, in [0, 2**63).
      env_index: Row of the env in the whole batch, over all lanes.
      incarnation: Number of times the env of this row has been rebuilt.

    Returns:
      An int in [0, 2**32) for `gymnasium.Env.reset(seed=...)`.
    """
    sequence = np.random.SeedSequence(root_seed, spawn_key=(env_index, incarnation))
    return int(sequence.generate_state(1, np.uint32)[0])


def spare_seed(seed: int) -> int:
    """Return the seed of a row's spare env.

    Args:
      seed: Seed of the row's first env: its `env_seed`, or the seed of a reset; not
        negative.

    Returns:
      An int in [0, 2**32) for `gymnasium.Env.reset(seed=...)`.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(1,))
    return int(sequence.generate_state(1, np.uint32)[0])
