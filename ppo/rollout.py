"""Rollouts and episodes.

A rollout consists of arrays `[T, B, ...]`, for T steps of a batch of B envs. The envs
and the policy fill the arrays one split (group of envs) at a time. Episodes
continue across rollouts. Episodes with a lost step are not counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from envserve.client import StepResult
from ppo.errors import EnvsLostError
from ppo.in_graph_batch_env import InGraphBatchEnv

__all__ = ["Rollout"]

#: Maximum number of metrics that `info_means` returns.
_MAX_NAMES = 32
#: The text of a fault ends with these words if NaN or infinity caused the fault.
_NON_FINITE = "end the episode before it diverges"
#: Minimum fraction of valid steps; an iteration with fewer valid steps is poor.
_MIN_VALID_FRACTION = 0.1
#: Number of consecutive poor iterations after which a run ends.
_MAX_POOR_ITERATIONS = 10
#: Number of consecutive batch steps without a valid row after which a run ends.
_MAX_EMPTY_STEPS = 8
#: Number of consecutive episodes that every env may lose before a run ends.
_MAX_LOST_IN_A_ROW = 50


class Rollout(NamedTuple):
    """NumPy arrays for T steps of a batch of B envs.

    Row `[t, b]` contains the observation of env b before step t, the action that the
    policy took, and the result of the step.
    """

    observation: Any
    """Nest of arrays `[T + 1, B, ...]`; the policy has not acted on the last
    observation yet."""
    action: np.ndarray
    """Policy actions, `[T, B, ...]`; see `InGraphBatchEnv` for their range."""
    log_prob: np.ndarray
    """Log-probabilities of the actions, float32 `[T, B]`."""
    reward: np.ndarray
    """Rewards, float64 `[T, B]`."""
    terminated: np.ndarray
    """Whether the episode terminated, bool `[T, B]`."""
    truncated: np.ndarray
    """Whether the episode was truncated, bool `[T, B]`."""
    valid: np.ndarray
    """Bool `[T, B]`; false where the reward and the flags do not come from the env,
    because it failed or was not available."""
    final_observation: Any
    """Last observation of an episode, nest of arrays `[T, B, ...]`; only meaningful in
    the step that ended the episode."""
    status: np.ndarray
    """`envserve.slab.Status` of each row, uint8 `[T, B]`."""
    state: Any = ()
    """For each recurrent core, its state before each of K sequences, `[K, B, units]`:
    that is, before steps 0, T / K, 2 T / K and so on."""

    @property
    def done(self) -> Any:
        """Whether an episode ended, bool `[T, B]`."""
        return self.terminated | self.truncated


def allocate_rollout(
    env: InGraphBatchEnv, horizon: int, state_sizes: Sequence[int], num_sequences: int
) -> Rollout:
    """Return a rollout of zeros.

    Args:
      env: Determines the shapes and dtypes of observations and actions.
      horizon: T, the number of batch steps.
      state_sizes: Number of units of each recurrent core.
      num_sequences: K, the number of states that are stored for each core.
    """

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

    If the rows are contiguous, the envs write their results directly into the rollout.
    Otherwise, for example with several servers, the envs write them into separate
    arrays, and `copy_result` copies them into the rollout.

    Args:
      rollout: The rollout to fill.
      env_indices: Indices of the split's envs, in ascending order.
      horizon: T, the number of batch steps.

    Attributes:
      env_indices: Indices of the split's envs.
      rows: Index of the split's rows in an array `[B, ...]`: a slice if they are
        contiguous, otherwise `env_indices`.
    """

    def __init__(self, rollout: Rollout, env_indices: np.ndarray, horizon: int) -> None:
        self.env_indices = env_indices
        self._rollout = rollout
        start, stop = int(env_indices[0]), int(env_indices[-1]) + 1
        self._is_contiguous = stop - start == len(env_indices)
        self.rows: Any = slice(start, stop) if self._is_contiguous else env_indices
        count = horizon if self._is_contiguous else 1
        self._results = [
            tf.nest.map_structure(
                lambda array: array[self.rows], _step_views(rollout, step)
            )
            for step in range(count)
        ]
        self._observations = [self._observation_rows(step) for step in range(count + 1)]

    def result(self, step: int) -> StepResult:
        """Return the arrays into which the envs must write the results of a step."""
        return self._results[step if self._is_contiguous else 0]

    def copy_result(self, step: int) -> None:
        """Copy a step into the rollout, unless the envs have written it there."""
        if not self._is_contiguous:
            targets = tf.nest.flatten(_step_views(self._rollout, step))
            results = tf.nest.flatten(self.result(step))
            for target, result in zip(targets, results, strict=True):
                target[self.rows] = result

    def record_policy_outputs(
        self, action: np.ndarray, log_prob: np.ndarray, state: Sequence[np.ndarray]
    ) -> None:
        """Store the policy's outputs for all steps.

        Args:
          action: `[T, n, ...]`.
          log_prob: `[T, n]`.
          state: For each recurrent core, its state before the first step of each
            sequence, `[K, n, units]`.
        """
        self._rollout.action[:, self.rows] = action
        self._rollout.log_prob[:, self.rows] = log_prob
        for rows, initial in zip(self._rollout.state, state, strict=True):
            rows[:, self.rows] = initial

    def observation_leaves(self, step: int) -> list[np.ndarray]:
        """Return the leaves of the observation before a step, `[n, ...]` each."""
        if self._is_contiguous:
            return self._observations[step]
        return self._observation_rows(step)

    def end_flags(self, step: int) -> list[np.ndarray]:
        """Return terminated, truncated and status of a step, `[n]` each.

        For step -1, all are zero.
        """
        rollout = self._rollout
        flags = (rollout.terminated, rollout.truncated, rollout.status)
        if step < 0:
            return [np.zeros(len(self.env_indices), rows.dtype) for rows in flags]
        return [rows[step][self.rows] for rows in flags]

    def _observation_rows(self, step: int) -> list[np.ndarray]:
        leaves = tf.nest.flatten(self._rollout.observation)
        return [leaf[step][self.rows] for leaf in leaves]


def step_arrays(rollout: Rollout) -> StepResult:
    """Return the arrays `[T, B, ...]` into which the envs write their results."""
    return StepResult(
        observation=tf.nest.map_structure(lambda leaf: leaf[1:], rollout.observation),
        reward=rollout.reward,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        valid=rollout.valid,
        final_observation=rollout.final_observation,
        status=rollout.status,
        infos={},
    )


def _step_views(rollout: Rollout, step: int) -> StepResult:
    """Return views of one step's arrays, into which the envs write."""
    return tf.nest.map_structure(lambda rows: rows[step], step_arrays(rollout))


class Episode(NamedTuple):
    """One complete episode."""

    env_index: int
    total_reward: float
    length: int
    info: Mapping[Any, Any] = {}
    """The info of the last step; empty if there is none."""


@np.errstate(over="ignore")  # sums of very large numbers
def info_means(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each numeric info value, under the name `info/NAME`.

    Each mean is over the episodes whose info has a finite number under that name.
    """
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            is_number = isinstance(value, float | int | np.number | np.bool_)
            if is_number and math.isfinite(value):
                values.setdefault(f"info/{name}", []).append(float(value))
    return {name: float(np.mean(values[name])) for name in sorted(values)[:_MAX_NAMES]}


def num_non_finite(rollout: Rollout, infos: Mapping[tuple[int, int], Any]) -> int:
    """Return the number of rows that were lost because of NaN or infinity.

    Args:
      rollout: The rollout.
      infos: Infos by step and env index; the info of a lost row describes the fault.
    """
    faults = [
        info.get("fault") for index, info in infos.items() if not rollout.valid[index]
    ]
    texts = [str(fault.get("text")) for fault in faults if isinstance(fault, dict)]
    return sum(text.endswith(_NON_FINITE) for text in texts)


class EpisodeTracker:
    """Computes the returns and lengths of episodes, which may span several rollouts.

    An episode with an invalid step is not counted, because its return is unknown.

    Attributes:
      consecutive_lost: For each env, the number of episodes with an invalid step
        since its last complete episode, int64 `[num_envs]`.
    """

    def __init__(self, num_envs: int) -> None:
        self._total_reward = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._has_invalid_step = np.zeros(num_envs, np.bool_)
        self.consecutive_lost = np.zeros(num_envs, np.int64)

    @np.errstate(over="ignore", invalid="ignore")  # sums of very large rewards
    def add(
        self, rollout: Rollout, infos: Mapping[tuple[int, int], Any] = {}
    ) -> list[Episode]:
        """Add the next rollout; return the episodes that it completes, in step order.

        Args:
          rollout: The rollout.
          infos: Infos of the steps that ended an episode, by step and env index.
        """
        episodes = []
        done = rollout.done
        for step in range(len(done)):
            valid = rollout.valid[step]
            self._total_reward += np.where(valid, rollout.reward[step], 0.0)
            self._length += valid
            self._has_invalid_step |= ~valid
            for env_index in np.flatnonzero(done[step]).tolist():
                self.consecutive_lost[env_index] += 1
                if not self._has_invalid_step[env_index]:
                    self.consecutive_lost[env_index] = 0
                    info = infos.get((step, env_index), {})
                    episodes.append(self._episode(env_index)._replace(info=info))
                self._total_reward[env_index] = 0.0
                self._length[env_index] = 0
                self._has_invalid_step[env_index] = False
        return episodes

    def running(self, min_length: int) -> list[Episode]:
        """Return the unfinished episodes of `min_length` or more steps, all valid."""
        is_long = ~self._has_invalid_step & (self._length >= min_length)
        return list(map(self._episode, np.flatnonzero(is_long).tolist()))

    def _episode(self, env_index: int) -> Episode:
        total_reward, length = self._total_reward[env_index], self._length[env_index]
        return Episode(env_index, float(total_reward), int(length))


class LostSteps:
    """Counts steps that were lost because envs failed; raises if there are too many.

    Args:
      horizon: Number of batch steps in an iteration.

    Attributes:
      total: Number of lost steps so far.
    """

    def __init__(self, horizon: int) -> None:
        self.total = 0
        self._poor_iterations = self._empty_iterations = 0
        # A short iteration may be lost completely because of a single fault.
        self._max_empty_iterations = math.ceil(_MAX_EMPTY_STEPS / horizon)

    def add(self, lost: int, steps: int, lost_in_a_row: int = 0) -> None:
        """Add an iteration.

        Args:
          lost: Number of steps lost in the iteration.
          steps: Total number of steps in the iteration.
          lost_in_a_row: Number of consecutive episodes that every env has lost, that
            is, the minimum over envs.

        Raises:
          EnvsLostError: All steps of the iteration were lost (with a horizon below 8,
            of several iterations in a row), or more than 90 % in each of the last 10
            iterations; or every env has lost its last 50 episodes.
        """
        self.total += lost
        is_poor = steps - lost < _MIN_VALID_FRACTION * steps
        self._poor_iterations = self._poor_iterations + 1 if is_poor else 0
        self._empty_iterations = self._empty_iterations + 1 if lost == steps else 0
        is_empty = self._empty_iterations >= self._max_empty_iterations
        if is_empty or self._poor_iterations >= _MAX_POOR_ITERATIONS:
            raise EnvsLostError(
                f"Too many env failures: {100 * lost / steps:.0f} % of the {steps:,} "
                "steps in the last iteration were lost. See the log for the reasons."
            )
        if not is_poor and lost_in_a_row >= _MAX_LOST_IN_A_ROW:
            raise EnvsLostError(
                f"Too many env failures: every env has lost its last {lost_in_a_row} "
                "episodes or more, and none was completed. See the log for the reasons."
            )
