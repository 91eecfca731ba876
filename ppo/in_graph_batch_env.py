"""A batch of envs inside a TensorFlow graph.

Each call from the graph into Python is one `tf.numpy_function` with static output
shapes and the dtypes of the env. Within `original_errors`, an exception raised in
Python reaches the caller unchanged, not as a TensorFlow error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv, StepResult
from ppo.agent.actions.action_spaces import ActionAdapter, make_action_adapter
from ppo.errors import EnvDataError
from ppo.spaces import observation_leaves

__all__ = ["InGraphBatchEnv"]

#: Larger numbers in observations make the sums of squares in their statistics infinite.
_MAX_OBSERVATION = 1e150


class InGraphBatchEnv:
    """Makes a `BatchEnv` callable from TensorFlow graphs.

    Pass an instance to `ppo.simulate.Simulation`, which collects rollouts, or call
    `step` in your own `tf.function`.

    Policy actions are normalised. For a Box with finite bounds, -1 and 1 are mapped to
    the bounds, and values outside [-1, 1] are clipped; actions of a squashed Gaussian
    are first mapped to [-1, 1] by tanh. Discrete and MultiDiscrete actions are numbered
    from 0. Actions have the shape `[B]` if Discrete, and `[B, A]` otherwise.

    Args:
      env: The envs.
      actions: Maps policy actions to env actions; by default the adapter that
        `make_action_adapter` returns for the action space.

    Attributes:
      observation_spec: Nest of `tf.TensorSpec` with shapes `[num_envs, ...]`.
      action_spec: `tf.TensorSpec` of policy actions.
      host_calls: The calls from a graph into Python.

    Raises:
      UnsupportedSpaceError: The observation or action space is not supported.
    """

    def __init__(self, env: BatchEnv, actions: ActionAdapter | None = None) -> None:
        self.env = env
        self.num_envs = env.num_envs
        spaces = observation_leaves(env.observation_space)
        self.observation_spec = tf.nest.map_structure(
            lambda space: tf.TensorSpec([env.num_envs, *space.shape], space.dtype),
            spaces,
        )
        self._actions = actions or make_action_adapter(env.action_space)
        self.action_spec = self._actions.spec(env.num_envs)
        self.host_calls = HostCalls()

    def __repr__(self) -> str:
        return f"<InGraphBatchEnv of {self.env!r}>"

    def reset(self) -> Any:
        """Reset all envs and return the first observation, `[B, ...]`."""
        observation = self.env.reset()
        check_finite(self.env, observation)
        return observation

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        """Map policy actions, one per row, to env actions."""
        return self._actions.to_env_action(action)

    def step(self, action: tf.Tensor) -> StepResult:
        """Step all envs, from your own `tf.function` or from Python.

        XLA cannot compile a function that calls this method.

        Args:
          action: Policy actions, with the shape and dtype of `action_spec`.

        Returns:
          The result as tensors, without infos. Envs whose episode has ended are
          already reset, as in `BatchEnv.step`.
        """
        flags = tf.TensorSpec([self.num_envs], tf.bool)
        specs = StepResult(
            observation=self.observation_spec,
            reward=tf.TensorSpec([self.num_envs], tf.float64),
            terminated=flags,
            truncated=flags,
            valid=flags,
            final_observation=self.observation_spec,
            status=tf.TensorSpec([self.num_envs], tf.uint8),
            infos={},
        )

        def step_envs(env_action: np.ndarray) -> list[np.ndarray]:
            result = self.env.step(env_action)
            check_finite(self.env, result.observation, result.reward)
            return tf.nest.flatten(result._replace(infos={}))

        outputs = self.host_calls.call(
            step_envs, [self.to_env_action(action)], tf.nest.flatten(specs)
        )
        return tf.nest.pack_sequence_as(specs, outputs)

    def original_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a `tf.function` raises errors of envs unchanged."""
        return self.host_calls.original_errors()


class HostCalls:
    """Calls from a graph into Python, whose exceptions can be raised unchanged."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def call(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        output_specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """Call a Python function from the graph; see also `original_errors`.

        Args:
          function: Maps NumPy arrays to NumPy arrays.
          inputs: Arguments of the function.
          output_specs: Shapes and dtypes of the returned arrays.
        """

        def record_error(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            try:
                return function(*arrays)
            except BaseException as error:  # including KeyboardInterrupt
                self._error = error
                raise

        dtypes = [spec.dtype for spec in output_specs]
        # In eager mode, a single output is not in a list.
        outputs = tf.nest.flatten(tf.numpy_function(record_error, inputs, dtypes))
        for output, spec in zip(outputs, output_specs, strict=True):
            output.set_shape(spec.shape)
        return outputs

    @contextlib.contextmanager
    def original_errors(self) -> Iterator[None]:
        """Raise the original exception of a function called by `call`.

        TensorFlow turns every exception of the function into an `UnknownError`, or into
        a `RuntimeError` if a signal handler raises at the same time.
        """
        self._error = None
        try:
            yield
        except (tf.errors.OpError, RuntimeError):
            if self._error is None:
                raise
            raise self._error from None


def check_finite(
    env: BatchEnv,
    observation: Any,
    reward: np.ndarray | None = None,
    env_indices: Any = None,
) -> None:
    """Raise an `EnvDataError` if an observation or a reward is NaN or infinite.

    Observations that are too large for the statistics are also an error.

    Args:
      env: The envs, for the error message.
      observation: Nest of rows `[n, ...]`.
      reward: Rewards `[n]`, if any.
      env_indices: Env index of each row, `[n]`; by default, 0 to n - 1.
    """
    arrays = [] if reward is None else [("reward", reward)]
    for index, leaf in enumerate(tf.nest.flatten(observation)):
        arrays.append((f"observation leaf {index}", leaf))
    for name, array in arrays:
        limit, text = np.inf, ""
        if array.dtype == np.float64 and name != "reward":
            limit, text = _MAX_OBSERVATION, f" below {_MAX_OBSERVATION:g}"
        if array.dtype.kind == "f" and not (is_valid := np.abs(array) < limit).all():
            row = int(np.argmin(is_valid.reshape(len(array), -1).all(axis=1)))
            env_index = row if env_indices is None else int(env_indices[row])
            raise EnvDataError(
                f"Env {env_index} of {env.spec.env_name}: expected a finite {name}"
                f"{text}, got {array[row]}; fix the env, or end the episode before its "
                "numbers overflow."
            )
