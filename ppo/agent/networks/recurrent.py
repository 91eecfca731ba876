"""Recurrent cores: hidden layers and a GRU between the observations and the heads.

The state of a row is the GRU's output at the previous step, `[N, units]`, and zero at
the start of an episode. `States.after_result`, for acting, and `next_state`, for
learning, follow the same rules. The update therefore computes the same states as the
rollout, except for the effect of changed parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from envserve.client import Status
from ppo.agent.networks.perceptrons import (
    NetworkPart,
    Read,
    flatten_observation,
    mlp,
    mlp_in_numpy,
    sigmoid,
)


class RecurrentCore(NetworkPart):
    """Summarises the observations of an episode so far in one vector per row.

    Args:
      input_size: Number of inputs per row.
      hidden_sizes: Sizes of the hidden layers before the GRU.
      units: Number of units of the GRU.
      activation: Activation function of the hidden layers.
      seed: Seed of the weights; the index of the layer is added to it.

    Attributes:
      units: Size of the state and of the output.
    """

    def __init__(
        self,
        input_size: int,
        *,
        hidden_sizes: Sequence[int],
        units: int,
        activation: str,
        seed: int,
    ) -> None:
        self.units = units
        self._activation = keras.activations.get(activation)
        self._hidden: Any = None
        if hidden_sizes:
            self._hidden = mlp(
                input_size,
                hidden_sizes[:-1],
                hidden_sizes[-1],
                output_gain=math.sqrt(2.0),
                activation=activation,
                seed=seed,
            )
        seed += len(hidden_sizes)
        self._cell = keras.layers.GRUCell(
            units,
            kernel_initializer=keras.initializers.Orthogonal(seed=seed),
            recurrent_initializer=keras.initializers.Orthogonal(seed=seed + 1),
            dtype="float32",
        )
        self._cell.build((None, hidden_sizes[-1] if hidden_sizes else input_size))
        hidden = {} if self._hidden is None else {"hidden": self._hidden}
        self.trackables = {**hidden, "cell": self._cell}

    def embed(self, observation: Any) -> tf.Tensor:
        """Return the GRU's inputs `[N, D]` for preprocessed rows `[N, ...]`."""
        rows = flatten_observation(observation)
        return rows if self._hidden is None else self._activation(self._hidden(rows))

    def advance(self, embedding: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """Run one step of the GRU.

        Args:
          embedding: Result of `embed`, `[N, D]`.
          state: State before the step, `[N, units]`.

        Returns:
          The output for the heads, float32 `[N, units]`. `next_state` computes the
          state of the next step from it.
        """
        output, _ = self._cell(embedding, [state])
        return output

    def in_numpy(self, read: Read, num_rows: int) -> Callable[..., np.ndarray] | None:
        """Return the NumPy form of `embed` followed by `advance`.

        The function maps flattened observations `[N, D]` and states `[N, units]` to
        outputs `[N, units]`.
        """
        hidden = None
        if self._hidden is not None:
            names = [self._activation.__name__] * len(self._hidden.layers)
            hidden = mlp_in_numpy(self._hidden, read, num_rows, names)
            if hidden is None:
                return None
        cell, units = self._cell, self.units
        kernel, recurrent = read(cell.kernel), read(cell.recurrent_kernel)
        input_bias, recurrent_bias = read(cell.bias)

        def advance(rows: np.ndarray, state: np.ndarray) -> np.ndarray:
            embedding = rows if hidden is None else hidden(rows)
            from_input = embedding @ kernel + input_bias  # [N, 3 * units]
            from_state = state @ recurrent + recurrent_bias
            gates = sigmoid(from_input[:, : 2 * units] + from_state[:, : 2 * units])
            update, reset = gates[:, :units], gates[:, units:]
            candidate = np.tanh(
                from_input[:, 2 * units :] + reset * from_state[:, 2 * units :]
            )
            return update * state + (1 - update) * candidate

        return advance

    def unroll(
        self,
        embedding: tf.Tensor,
        state: tf.Tensor,
        ended: tf.Tensor,
        pending: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Run the GRU over N sequences of L steps.

        Args:
          embedding: Results of `embed`, float32 `[L, N, D]`.
          state: States before the first step, float32 `[N, units]`.
          ended: bool `[L, N]`; whether an episode ended in the step.
          pending: bool `[L, N]`; whether the row was padding in the step; see
            `is_pending`.

        Returns:
          The outputs of all steps, `[L, N, units]`, and the states after the last
          step.
        """
        length = embedding.shape[0]
        outputs = tf.TensorArray(tf.float32, length, element_shape=state.shape)

        def body(
            step: tf.Tensor, state: tf.Tensor, outputs: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
            output = self.advance(embedding[step], state)
            state = next_state(state, output, ended[step], pending[step])
            return step + 1, state, outputs.write(step, output)

        _, state, outputs = tf.while_loop(
            lambda step, *_: step < length,
            body,
            (tf.constant(0), state, outputs),
            maximum_iterations=length,  # XLA needs a bound to compute gradients
        )
        return outputs.stack(), state


class States(NamedTuple):
    """States of the recurrent cores for n rows, before and after the current step.

    Both are needed until the result of the step is received, because a padding row
    continues from its state before the step.
    """

    before: tuple[Any, ...]
    """State of each core before the step, float32 `[n, units]`; NumPy arrays, or
    tensors in a graph."""
    after: tuple[Any, ...]
    """State of each core after the step, float32 `[n, units]`."""

    @classmethod
    def zero(cls, num_rows: int, sizes: Sequence[int]) -> Self:
        """Return the states at the start of an episode.

        Args:
          num_rows: Number of rows.
          sizes: Number of units of each core.
        """
        states = tuple(np.zeros([num_rows, size], np.float32) for size in sizes)
        return cls(states, states)

    def after_result(self, terminated: Any, truncated: Any, status: Any) -> Self:
        """Return the states for the next step.

        Args:
          terminated: bool `[n]`; whether the current step terminated an episode.
          truncated: bool `[n]`; whether the current step truncated an episode.
          status: `envserve.slab.Status` of the current step, uint8 `[n]`.
        """
        if not self.after:
            return self
        ended, pairs = terminated | truncated, zip(self.before, self.after, strict=True)
        if isinstance(ended, np.ndarray):
            ended, pending = ended[:, None], (status == Status.PENDING)[:, None]
            states = tuple(
                np.where(ended, np.float32(0), np.where(pending, before, after))
                for before, after in pairs
            )
        else:
            states = tuple(
                next_state(*pair, ended, is_pending(status)) for pair in pairs
            )
        return type(self)(states, states)


def next_state(
    state: tf.Tensor, output: tf.Tensor, ended: tf.Tensor, pending: tf.Tensor
) -> tf.Tensor:
    """Return the states before the next observation.

    The state of a padding row does not change: the next step returns the same
    observation again, and the core must not process an observation twice.

    Args:
      state: States before the step, `[N, units]`.
      output: Outputs of the core in the step, `[N, units]`.
      ended: bool `[N]`; whether the step ended an episode, for any reason.
      pending: bool `[N]`; whether the row was padding in the step; see `is_pending`.

    Returns:
      Zero, `state` or `output` for each row, `[N, units]`.
    """
    following = tf.where(pending[:, None], state, output)
    return tf.where(ended[:, None], tf.zeros_like(following), following)


def is_pending(status: tf.Tensor) -> tf.Tensor:
    """Return a bool mask of the padding rows, in which no env was stepped.

    Args:
      status: `envserve.slab.Status` as uint8.
    """
    return tf.equal(status, tf.constant(int(Status.PENDING), tf.uint8))
