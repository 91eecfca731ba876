"""What T batch steps of B envs gave: arrays `[T, B, ...]`, and the episodes in them.

Envs and policy write into the arrays split by split. Episodes go on from rollout to
rollout, and one that lost a step counts as nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from envserve.client import StepResult
from ppo.errors import EnvsLostError
from ppo.in_graph_batch_env import InGraphBatchEnv

_MAX_NAMES = 32
_FEW_VALID = 0.1
_MAX_POOR_ITERATIONS = 10


class Rollout(NamedTuple):
    """What T batch steps of B envs gave, as NumPy arrays.

    Row `[t, b]` holds the observation that env b was in, the policy's action there,
    and what the env answered. `final_observation` is only meaningful where the episode
    ended; where `valid` is false, everything but the observation is made up.
    """

    observation: Any  # [T + 1, B, ...]: the last one is still to be acted on
    action: np.ndarray
    log_prob: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    final_observation: Any
    status: np.ndarray  # uint8, see `envserve.slab.Status`
    state: Any = ()  # of each memory: [K, B, units], before step 0, T / K, 2 T / K, ...

    @property
    def done(self) -> Any:
        """Where an episode ended, bool `[T, B]`."""
        return self.terminated | self.truncated


def allocate_rollout(
    env: InGraphBatchEnv, horizon: int, state_sizes: Sequence[int], num_sequences: int
) -> Rollout:
    """Return a rollout of zeros, with so many states `[B, units]` of each memory."""

    def rows(spec: tf.TensorSpec, length: int) -> np.ndarray:
        return np.zeros((length, *spec.shape), spec.dtype.as_numpy_dtype)

    batch = (horizon, env.num_envs)
    return Rollout(
        observation=tf.nest.map_structure(
            lambda spec: rows(spec, horizon + 1), env.observation_spec
        ),
        action=rows(env.action_spec, horizon),
        log_prob=np.zeros(batch, np.float32),
        reward=np.zeros(batch, np.float64),
        terminated=np.zeros(batch, np.bool_),
        truncated=np.zeros(batch, np.bool_),
        valid=np.zeros(batch, np.bool_),
        final_observation=tf.nest.map_structure(
            lambda spec: rows(spec, horizon), env.observation_spec
        ),
        status=np.zeros(batch, np.uint8),
        state=tuple(
            np.zeros((num_sequences, env.num_envs, size), np.float32)
            for size in state_sizes
        ),
    )


class SplitRows:
    """The rows of one split in a rollout.

    Where they follow each other, results are written straight into the rollout; else,
    as with several servers, by way of arrays of the split's own.
    """

    def __init__(self, rollout: Rollout, env_indices: np.ndarray, horizon: int) -> None:
        self.env_indices = env_indices
        self._rollout = rollout
        start, stop = int(env_indices[0]), int(env_indices[-1]) + 1
        self._is_range = stop - start == len(env_indices)
        self._rows: Any = slice(start, stop) if self._is_range else env_indices
        count = horizon if self._is_range else 1
        self._results = [
            tf.nest.map_structure(
                lambda array: array[self._rows], _step_views(rollout, step)
            )
            for step in range(count)
        ]
        self._observations = [self._observation_rows(step) for step in range(count + 1)]

    def result(self, step: int) -> StepResult:
        """Return where the envs have to write a step."""
        return self._results[step if self._is_range else 0]

    def copy_result(self, step: int) -> None:
        """Take a step into the rollout that was written where `result` says."""
        if not self._is_range:
            target = _step_views(self._rollout, step)
            pair = tf.nest.flatten(target), tf.nest.flatten(self.result(step))
            for rows, row in zip(*pair, strict=True):
                rows[self._rows] = row

    def record_policy_outputs(
        self, action: tf.Tensor, log_prob: tf.Tensor, state: Sequence[tf.Tensor]
    ) -> None:
        """Store what the policy gave in all steps, `[T, n, ...]`.

        `state` is what its memories held before the first step of each sequence,
        `[K, n, units]`.
        """
        self._rollout.action[:, self._rows] = action
        self._rollout.log_prob[:, self._rows] = log_prob
        for rows, first in zip(self._rollout.state, state, strict=True):
            rows[:, self._rows] = first

    def observation_leaves(self, step: int) -> list[np.ndarray]:
        """Return the observation that the policy has to act on."""
        if self._is_range:
            return self._observations[step]
        return self._observation_rows(step)

    def observation(self, step: int) -> Any:
        """Return the same, structured as the space."""
        leaves = self.observation_leaves(step)
        return tf.nest.pack_sequence_as(self._rollout.observation, leaves)

    def end_flags(self, step: int) -> list[np.ndarray]:
        """Return terminated, truncated and status of a step; -1: as if of none."""
        rollout = self._rollout
        flags = (rollout.terminated, rollout.truncated, rollout.status)
        if step < 0:
            return [np.zeros(len(self.env_indices), rows.dtype) for rows in flags]
        return [rows[step][self._rows] for rows in flags]

    def specs(self, batch_specs: Any) -> list[tf.TensorSpec]:
        """Return the specs of an observation's leaves, given those of the batch."""
        return [
            tf.TensorSpec([len(self.env_indices), *spec.shape[1:]], spec.dtype)
            for spec in tf.nest.flatten(batch_specs)
        ]

    def _observation_rows(self, step: int) -> list[np.ndarray]:
        leaves = tf.nest.flatten(self._rollout.observation)
        return [leaf[step][self._rows] for leaf in leaves]


def _step_views(rollout: Rollout, step: int) -> StepResult:
    """Return the rows of one step, for the envs to write into."""
    return StepResult(
        observation=tf.nest.map_structure(
            lambda leaf: leaf[step + 1], rollout.observation
        ),
        reward=rollout.reward[step],
        terminated=rollout.terminated[step],
        truncated=rollout.truncated[step],
        valid=rollout.valid[step],
        final_observation=tf.nest.map_structure(
            lambda leaf: leaf[step], rollout.final_observation
        ),
        status=rollout.status[step],
        infos={},
    )


class Episode(NamedTuple):
    """One complete episode."""

    env_index: int
    total_reward: float
    length: int
    info: Mapping[Any, Any] = {}
    """That of its last step, as far as it is known."""


def info_means(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each number, `info/NAME`, over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                values.setdefault(f"info/{name}", []).append(value)
    return {name: float(np.mean(values[name])) for name in sorted(values)[:_MAX_NAMES]}


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
        self._has_invalid_step = np.zeros(num_envs, np.bool_)
        self.consecutive_lost = np.zeros(num_envs, np.int64)

    def add(
        self, rollout: Rollout, infos: Mapping[tuple[int, int], Any] = {}
    ) -> list[Episode]:
        """Take in the next rollout, and infos of ended episodes by step and env.

        Returns its completed episodes in order of time.
        """
        episodes = []
        ends = rollout.done
        for step in range(len(ends)):
            valid = rollout.valid[step]
            self._total_reward += np.where(valid, rollout.reward[step], 0.0)
            self._length += valid
            self._has_invalid_step |= ~valid
            for env_index in np.flatnonzero(ends[step]).tolist():
                self.consecutive_lost[env_index] += 1
                if not self._has_invalid_step[env_index]:
                    self.consecutive_lost[env_index] = 0
                    episodes.append(
                        Episode(
                            env_index,
                            float(self._total_reward[env_index]),
                            int(self._length[env_index]),
                            infos.get((step, env_index), {}),
                        )
                    )
                self._total_reward[env_index] = 0.0
                self._length[env_index] = 0
                self._has_invalid_step[env_index] = False
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
