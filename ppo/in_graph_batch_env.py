"""A batch of envs inside a TensorFlow graph.

Every call into Python is one `tf.numpy_function` with static output shapes and the
env's own dtypes. An exception raised there reaches the caller as itself.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.agent.actions.action_spaces import ActionAdapter, make_action_adapter
from ppo.agent.observations import space_leaves
from ppo.errors import EnvDataError, UnsupportedSpaceError


class InGraphBatchEnv:
    """Steps a `BatchEnv` from graph code.

    Policies act in a normalised range: for a Box action space with finite bounds,
    -1 and 1 stand for the bounds and what lies beyond is clipped; choices of Discrete
    and MultiDiscrete actions count from 0. Beyond Discrete, actions are flat `[B, A]`.
    An agent tells by its `actions` if it acts otherwise.
    """

    def __init__(self, env: BatchEnv, actions: ActionAdapter | None = None) -> None:
        self.env = env
        self.num_envs = env.num_envs
        spaces = space_leaves(env.observation_space)
        sizes = [int(np.prod(space.shape)) for space in tf.nest.flatten(spaces)]
        if not min(sizes, default=0):
            raise UnsupportedSpaceError(
                f"observation: expected something to observe, got {spaces}"
            )
        self.observation_spec = tf.nest.map_structure(
            lambda space: tf.TensorSpec([env.num_envs, *space.shape], space.dtype),
            spaces,
        )
        """Nest of `tf.TensorSpec` with rows `[num_envs, ...]`."""
        self._actions = actions or make_action_adapter(env.action_space)
        self.action_spec = self._actions.spec(env.num_envs)
        """`tf.TensorSpec` of the actions that policies give."""
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<InGraphBatchEnv of {self.env!r}>"

    def reset(self) -> Any:
        """Start new episodes in all envs; returns the observation, rows `[B, ...]`."""
        observation = self.env.reset()
        self.check_finite(observation, np.zeros(self.num_envs))
        return observation

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

        They are rows of some envs, by default of all.
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
