"""The replay buffer: the most recent transitions, in NumPy arrays on this host."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.host_resources import cgroup_limits
from ppo.errors import ConfigError
from ppo.rollout import Rollout


class Replay:
    """Ring buffer of transitions.

    The arrays are allocated when the first rollout is added. They take up physical
    memory only as the buffer fills.

    Args:
        capacity: Maximum number of transitions; the oldest are overwritten.

    Attributes:
        size: Number of transitions in the buffer.
    """

    def __init__(self, capacity: int) -> None:
        self._arrays: dict[str, Any] = {}
        self._capacity = capacity
        self._next = 0  # index of the next row to write
        self.size = 0

    def add(self, rollout: Rollout) -> None:
        """Add the valid transitions of a rollout.

        The next observation of a step that ended an episode is the final observation of
        this episode, not the first observation of the next episode.

        Raises:
            ConfigError: This host does not have enough memory for the buffer.
        """
        valid, done = rollout.valid, rollout.done[rollout.valid]
        with np.errstate(over="ignore"):  # infinite rewards cause a `DivergedError`
            reward = rollout.reward[valid].astype(np.float32)

        def next_rows(leaf: np.ndarray, final: np.ndarray) -> np.ndarray:
            rows = leaf[1:][valid]
            rows[done] = final[valid][done]
            return rows

        observations = rollout.observation, rollout.final_observation
        transitions = {
            "observation": tf.nest.map_structure(
                lambda x: x[:-1][valid], observations[0]
            ),
            "next_observation": tf.nest.map_structure(next_rows, *observations),
            "action": rollout.action[valid],
            "reward": reward,
            "terminated": rollout.terminated[valid],
        }
        if not self._arrays:
            self._arrays = _allocate(self._capacity, transitions)
        count = min(len(done), self._capacity)
        indices = (self._next + np.arange(count)) % self._capacity
        arrays = tf.nest.flatten(self._arrays)
        for array, rows in zip(arrays, tf.nest.flatten(transitions), strict=True):
            array[indices] = rows[len(rows) - count :]
        self._next = (self._next + count) % self._capacity
        self.size = min(self.size + count, self._capacity)

    def sample(self, shape: tuple[int, int], seed: tuple[int, int]) -> dict[str, Any]:
        """Return transitions `[*shape, ...]`, sampled uniformly with replacement."""
        indices = np.random.default_rng(seed).integers(self.size, size=shape)
        return tf.nest.map_structure(lambda rows: rows[indices], self._arrays)


def _allocate(capacity: int, transitions: Any) -> Any:
    """Return arrays for `capacity` rows with the shapes and dtypes of `transitions`."""
    limits = cgroup_limits(Path("/"), "memory", ("limit_in_bytes",))
    available = [limit for (limit,) in limits]
    with contextlib.suppress(OSError):  # no /proc on macOS
        words = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
        available += [1024 * int(words[0])]
    leaves = tf.nest.flatten(transitions)
    row_bytes = sum(leaf.nbytes // max(len(leaf), 1) for leaf in leaves)
    max_size = int(0.9 * min(available, default=2**60)) // row_bytes
    if capacity > max_size:
        raise ConfigError(
            f"replay_size: {capacity:,} transitions need "
            f"{capacity * row_bytes / 2**30:.1f} GiB of memory, but only "
            f"{min(available) / 2**30:.1f} GiB are available; set "
            f"replay_size={max_size} or less."
        )
    return tf.nest.map_structure(
        lambda rows: np.zeros((capacity, *rows.shape[1:]), rows.dtype), transitions
    )
