"""Whole rollouts in one graph call.

`simulate` runs T batch steps in one `tf.while_loop`. Each step is one pass through the
policy and one call into Python, which steps the envs and lets them write their rows
straight into the rollout's arrays `[T, B, ...]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from envserve.client import StepResult
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv

__all__ = ["Policy", "Rollout", "Simulation", "simulate"]

Policy = Callable[[Any, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Maps a raw observation `[B, ...]` and a seed (int32 pair) to actions and their
log-probabilities `[B]`."""


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

    @property
    def done(self) -> np.ndarray:
        """Where an episode ended, bool `[T, B]`."""
        return self.terminated | self.truncated


class Simulation:
    """Envs, a policy and the arrays for one rollout; `run` fills them again and again.

    Args:
        env: the envs; they are reset when the first rollout starts, and each further
            rollout goes on where the last one ended.
        policy: gives actions; traced into the loop's graph.
        horizon: T, batch steps per rollout.
        on_step: called after every batch step; what it raises ends the rollout.
    """

    def __init__(
        self,
        env: InGraphBatchEnv,
        policy: Policy,
        horizon: int,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._env = env
        self._policy = policy
        self._horizon = horizon
        self._on_step = on_step
        self._rollout = _allocate(env, horizon)
        self._results = [_step_views(self._rollout, step) for step in range(horizon)]
        self._observation_rows = [
            tf.nest.flatten(result.observation) for result in self._results
        ]
        self._loop = tf.function(self._steps)
        self._is_started = False

    @property
    def num_traces(self) -> int:
        """How often the loop has been traced: once, however many rollouts were run."""
        return int(self._loop.experimental_get_tracing_count())

    def run(self, seed: tuple[int, int]) -> Rollout:
        """Collect a rollout.

        Args:
            seed: the same pair gives the same noise; use each once.

        Returns:
            The rollout. Its arrays are overwritten by the next call.

        Raises:
            EnvDataError: an observation or a reward is not finite.
            DivergedError: a log-probability is not finite.
            envserve.errors.EnvserveError: whatever the envs raise.
        """
        with self._env.original_errors():
            if not self._is_started:
                first = self._env.reset()
                tf.nest.map_structure(_write_first, self._rollout.observation, first)
                self._is_started = True
            else:
                tf.nest.map_structure(_carry_over, self._rollout.observation)
            observation = tf.nest.map_structure(
                lambda leaf: tf.constant(leaf[0]), self._rollout.observation
            )
            self._loop(observation, tf.constant(seed, tf.int32))
        return self._rollout

    def _steps(self, observation: Any, seed: tf.Tensor) -> tf.Tensor:
        def body(step: tf.Tensor, observation: Any) -> tuple[tf.Tensor, Any]:
            env_action, action, log_prob = self._choose_actions(observation, seed, step)
            leaves = self._env.host_call(
                self._step_and_record,
                [step, env_action, action, log_prob],
                tf.nest.flatten(self._env.observation_spec),
            )
            return step + 1, tf.nest.pack_sequence_as(observation, leaves)

        step, _ = tf.while_loop(
            lambda step, _: step < self._horizon,
            body,
            (tf.constant(0), observation),
            parallel_iterations=1,
            maximum_iterations=self._horizon,
        )
        return step

    # Not compiled with XLA: entering a compiled function from the loop costs more than
    # it saves, 1.6 times the whole rollout's time with 16 envs, 4 times with 256.
    def _choose_actions(
        self, observation: Any, seed: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        step_seed = tf.random.experimental.stateless_fold_in(seed, step)
        action, log_prob = self._policy(observation, step_seed)
        return self._env.to_env_action(action), action, log_prob

    def _step_and_record(
        self,
        step: np.ndarray,
        env_action: np.ndarray,
        action: np.ndarray,
        log_prob: np.ndarray,
    ) -> list[np.ndarray]:
        if not np.isfinite(log_prob).all():
            env_index = int(np.argmin(np.isfinite(log_prob)))
            raise DivergedError(
                f"Env {env_index} of {self._env.env!r}: expected a finite "
                f"log-probability of its action, got {log_prob[env_index]}; training "
                "has diverged, try a lower learning_rate."
            )
        result = self._results[step]
        self._env.env.step(env_action, out=result)
        self._on_step()
        self._rollout.action[step] = action
        self._rollout.log_prob[step] = log_prob
        self._env.check_finite(result.observation, result.reward)
        return self._observation_rows[step]


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    For more than one rollout keep a `Simulation`: it is traced and compiled once.
    """
    return Simulation(env, policy, horizon).run(seed)


def _allocate(env: InGraphBatchEnv, horizon: int) -> Rollout:
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
    )


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
        infos={},
    )


def _write_first(rows: np.ndarray, first: Any) -> None:
    rows[0] = first


def _carry_over(rows: np.ndarray) -> None:
    rows[0] = rows[-1]
