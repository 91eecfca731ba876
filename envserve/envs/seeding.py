"""Seeds that do not depend on where an env runs.

An env's seed follows from the root seed, its row in the batch and how often it has
been rebuilt; never from the number of workers, lanes or servers.
"""

from __future__ import annotations

import numpy as np

__all__ = ["INCARNATIONS_PER_LEASE", "draw_root_seed", "env_seed", "spare_seed"]

MAX_ROOT_SEED = 2**63 - 1
#: By how much each further lease of a client raises the first incarnation of its envs:
#: more often no env is rebuilt within a lease.
INCARNATIONS_PER_LEASE = 1 << 18


def draw_root_seed() -> int:
    """Returns a root seed from the operating system's entropy."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> 1)


def env_seed(root_seed: int, env_index: int, incarnation: int) -> int:
    """Returns the seed of one incarnation of one env.

    Args:
      root_seed: Seed of the whole batch, in [0, 2**63).
      env_index: Row of the env in the whole batch, over all lanes.
      incarnation: How often this env has been rebuilt; 0 for the first.

    Returns:
      An int in [0, 2**32), fit for `gymnasium.Env.reset(seed=...)`.
    """
    sequence = np.random.SeedSequence(root_seed, spawn_key=(env_index, incarnation))
    return int(sequence.generate_state(1, np.uint32)[0])


def spare_seed(seed: int) -> int:
    """Returns the seed of a row's spare env, whose other env is seeded with `seed`.

    Args:
      seed: An `env_seed`, or a seed that was given to a reset; not negative.

    Returns:
      An int in [0, 2**32), fit for `gymnasium.Env.reset(seed=...)`.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(1,))
    return int(sequence.generate_state(1, np.uint32)[0])
