"""Memories: hidden layers and a GRU between the observations and a network's heads.

The state of a row is what the GRU gave at its last step, `[N, units]`, and zero where
an episode begins. `next_state` alone says what becomes of it, to those who act and to
those who learn, so that the learner meets the states that acted.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from envserve.client import Status
from ppo.agent.networks.perceptrons import NetworkPart, flatten_observation, mlp


class RecurrentCore(NetworkPart):
    """Sums up an episode's observations until now in one vector per row.

    Attributes:
        units: size of that vector.
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
        )
        self._cell.build((None, hidden_sizes[-1] if hidden_sizes else input_size))
        hidden = {} if self._hidden is None else {"hidden": self._hidden}
        self.trackables = {**hidden, "cell": self._cell}

    def embed(self, observation: Any) -> tf.Tensor:
        """Return what the GRU takes for preprocessed rows `[N, ...]`: `[N, D]`."""
        rows = flatten_observation(observation)
        return rows if self._hidden is None else self._activation(self._hidden(rows))

    def advance(self, embedding: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """Take in one observation per row, `[N, D]` as `embed` gives it.

        Returns:
            What the heads take, float32 `[N, units]`; it is the state of the next step,
            too, unless `next_state` says otherwise.
        """
        output, _ = self._cell(embedding, [state])
        return output

    def unroll(
        self,
        embedding: tf.Tensor,
        state: tf.Tensor,
        ended: tf.Tensor,
        pending: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Take in sequences, one step after the other.

        Args:
            embedding: float32 `[L, N, D]`, as `embed` gives it.
            state: float32 `[N, units]`, before the first step.
            ended: bool `[L, N]`; an episode ended in this step.
            pending: bool `[L, N]`; nothing was done in this step.

        Returns:
            The outputs of the steps, `[L, N, units]`, and the state after the last.
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
            maximum_iterations=length,  # XLA has to know, to find gradients
        )
        return outputs.stack(), state


class States(NamedTuple):
    """States of some rows in each memory, `[n, units]`, before a step and after it.

    As long as the step's result is out, nobody knows which of the two goes on.
    """

    before: tuple[tf.Tensor, ...]
    after: tuple[tf.Tensor, ...]

    @classmethod
    def zero(cls, num_rows: int, sizes: Sequence[int]) -> Self:
        """Return the states of rows whose episodes begin, given the memories' units."""
        states = tuple(tf.zeros([num_rows, size]) for size in sizes)
        return cls(states, states)

    def after_result(
        self, terminated: tf.Tensor, truncated: tf.Tensor, status: tf.Tensor
    ) -> Self:
        """Return the states to go on from, given a step's result, `[n]` each."""
        if not self.after:
            return self
        ended, pending = terminated | truncated, is_pending(status)
        states = tuple(
            next_state(before, after, ended, pending)
            for before, after in zip(self.before, self.after, strict=True)
        )
        return type(self)(states, states)


def next_state(
    state: tf.Tensor, output: tf.Tensor, ended: tf.Tensor, pending: tf.Tensor
) -> tf.Tensor:
    """Return the state in which a row meets its next observation.

    A row that came back as padding will be asked the same again, so its observation is
    not taken in twice; a lost episode ends some rows later.

    Args:
        state: `[N, units]`, before the step.
        output: `[N, units]`, what a memory made of that and the step's observation.
        ended: bool `[N]`; the step ended an episode, in whatever way.
        pending: bool `[N]`; the step did nothing, see `is_pending`.

    Returns:
        `[N, units]`: zero, `state` or `output`.
    """
    kept = tf.where(pending[:, None], state, output)
    return tf.where(ended[:, None], tf.zeros_like(kept), kept)


def is_pending(status: tf.Tensor) -> tf.Tensor:
    """Return where nothing was done, bool, given `envserve.slab.Status` as uint8."""
    return tf.equal(status, tf.constant(int(Status.PENDING), tf.uint8))
