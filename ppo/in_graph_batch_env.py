"""A batch of envs inside a TensorFlow graph.

Every call into Python is one `tf.numpy_function` with static output shapes and the
env's own dtypes. An exception raised there reaches the caller as itself.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.actions.kinds import action_kind
from ppo.errors import EnvDataError
from ppo.observations import space_leaves

__all__ = ["InGraphBatchEnv", "StepTensors"]


class StepTensors(NamedTuple):
    """One batch step as tensors with rows `[num_envs, ...]`."""

    observation: Any
    reward: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    valid: tf.Tensor
    final_observation: Any


class InGraphBatchEnv:
    """Steps a `BatchEnv` from graph code.

    Policies act in a normalised range: for a Box action space with finite bounds,
    -1 and 1 stand for the bounds and what lies beyond is clipped; choices of Discrete
    and MultiDiscrete actions count from 0. Beyond Discrete, actions are flat `[B, A]`.
    """

    def __init__(self, env: BatchEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        spaces = space_leaves(env.observation_space)
        self.observation_spec = tf.nest.map_structure(self._row_spec, spaces)
        """Nest of `tf.TensorSpec` with rows `[num_envs, ...]`."""
        self._actions = action_kind(env.action_space)
        self.action_spec = self._actions.spec(env.num_envs)
        """`tf.TensorSpec` of the actions that policies give."""
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        """Tell what is wrapped."""
        return f"<InGraphBatchEnv of {self.env!r}>"

    def reset(self) -> Any:
        """Start new episodes in all envs; returns the observation, rows `[B, ...]`."""
        leaves = self.host_call(self._reset, [], tf.nest.flatten(self.observation_spec))
        return tf.nest.pack_sequence_as(self.observation_spec, leaves)

    def step(self, action: tf.Tensor) -> StepTensors:
        """Step all envs once, with the policy's actions.

        Args:
            action: as `action_spec` says.

        Returns:
            The step; envs whose episode ended have already started the next one, and
            their last observation is in `final_observation`.
        """
        flags = tf.TensorSpec([self.num_envs], tf.bool)
        rewards = tf.TensorSpec([self.num_envs], tf.float64)
        spec = StepTensors(
            self.observation_spec, rewards, flags, flags, flags, self.observation_spec
        )
        outputs = self.host_call(
            self._step, [self.to_env_action(action)], tf.nest.flatten(spec)
        )
        step: StepTensors = tf.nest.pack_sequence_as(spec, outputs)
        return step

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        """Turn policy actions, of any number of rows, into the env's own."""
        return self._actions.to_env_action(action)

    def host_call(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        output_specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """Call Python from the graph, with NumPy arrays in and out.

        Within `original_errors`, an exception of `function` is raised unchanged.
        """

        def guarded(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            try:
                return function(*arrays)
            except BaseException as error:  # KeyboardInterrupt too
                self._error = error
                raise

        dtypes = [spec.dtype for spec in output_specs]
        # Outside a graph a single output comes bare.
        outputs = tf.nest.flatten(tf.numpy_function(guarded, inputs, dtypes))
        for output, spec in zip(outputs, output_specs, strict=True):
            output.set_shape(spec.shape)
        return outputs

    @contextlib.contextmanager
    def original_errors(self) -> Iterator[None]:
        """Raise the exception that `host_call` met, not TensorFlow's wrapping of it.

        TensorFlow turns every exception of host code into an `UnknownError`, or, if a
        signal handler raises meanwhile, into a `RuntimeError`.
        """
        self._error = None
        try:
            yield
        except (tf.errors.OpError, RuntimeError):
            if self._error is None:
                raise
            raise self._error from None

    def check_finite(
        self, observation: Any, reward: np.ndarray, env_indices: Any = None
    ) -> None:
        """Raise `EnvDataError`, naming the env, unless all numbers are finite.

        Args:
            observation: rows of some envs.
            reward: theirs.
            env_indices: which envs; by default all.
        """
        arrays = [("reward", reward)]
        for index, leaf in enumerate(tf.nest.flatten(observation)):
            arrays.append((f"observation leaf {index}", leaf))
        for what, array in arrays:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
                row = int(np.argmin(rows))
                env_index = row if env_indices is None else int(env_indices[row])
                raise EnvDataError(
                    f"Env {env_index} of {self.env!r}: expected a finite {what}, got "
                    f"{array[row]}; repair the env, or end the episode before "
                    "its numbers overflow."
                )

    def _reset(self) -> list[np.ndarray]:
        observation = self.env.reset()
        self.check_finite(observation, np.zeros(self.num_envs))
        return list(tf.nest.flatten(observation))

    def _step(self, action: np.ndarray) -> list[np.ndarray]:
        result = self.env.step(action)
        self.check_finite(result.observation, result.reward)
        return list(tf.nest.flatten(StepTensors(*result[:6])))

    def _row_spec(self, space: gymnasium.Space[Any]) -> tf.TensorSpec:
        return tf.TensorSpec([self.num_envs, *(space.shape or ())], space.dtype)
