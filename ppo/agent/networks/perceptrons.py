"""Multilayer perceptrons, and the heads of policy and value networks, in Keras.

A network maps the output of its torso to the parameters of an action distribution, or
to values. Without a torso, its input is a preprocessed observation: a nest of float32
arrays `[N, ...]`. To add a kind of network, subclass `NetworkPart` and implement
`__call__`.

The parts of small networks also have a NumPy form, `in_numpy`, because calling a
TensorFlow function takes longer than running such a network.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ppo.config.config import Config

Read = Callable[[Any], np.ndarray]
"""Returns the value of a Keras variable in a snapshot."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


#: Activation functions that have a NumPy form (not `gelu`, because NumPy has no erf).
_ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0, out=x),
    "silu": lambda x: x * sigmoid(x),
    "tanh": lambda x: np.tanh(x, out=x),
}


def flatten_observation(observation: Any) -> tf.Tensor:
    """Concatenate float32 leaves `[N, ...]` into one vector per row, `[N, D]`.

    The leaves are in the order of `tf.nest.flatten`.
    """
    leaves = tf.nest.flatten(observation)
    rows = [tf.reshape(leaf, [-1, math.prod(leaf.shape[1:])]) for leaf in leaves]
    return rows[0] if len(rows) == 1 else tf.concat(rows, axis=1)


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    *,
    output_gain: float,
    activation: str,
    seed: int,
) -> keras.Sequential:
    """Create a perceptron with orthogonal weights and zero biases.

    The weights of hidden layers have gain sqrt(2). The weights of the output layer,
    which has no activation function, have gain `output_gain`.
    """
    layers: list[Any] = [keras.Input((input_size,), dtype="float32")]
    for index, size in enumerate([*hidden_sizes, output_size]):
        is_last = index == len(hidden_sizes)
        gain = output_gain if is_last else math.sqrt(2.0)
        layers.append(
            keras.layers.Dense(
                size,
                activation=None if is_last else activation,
                kernel_initializer=keras.initializers.Orthogonal(
                    gain=gain, seed=seed + index
                ),
                dtype="float32",
            )
        )
    return keras.Sequential(layers)


def mlp_in_numpy(
    model: keras.Sequential, read: Read, num_rows: int, activations: Sequence[str]
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the NumPy form of a perceptron, float32 `[N, D]` to `[N, K]`.

    Args:
      model: Result of `mlp`.
      read: Returns the value of a variable.
      num_rows: Largest N. Biases are repeated for as many rows, because adding them
        is then twice as fast as broadcasting one row.
      activations: Name of the activation function after each layer.

    Returns:
      The function, or None if an activation function has no NumPy form.
    """
    if not set(activations) <= set(_ACTIVATIONS):
        return None
    layers = [
        (
            read(layer.kernel),
            np.tile(read(layer.bias), (num_rows, 1)),
            _ACTIVATIONS[name],
        )
        for layer, name in zip(model.layers, activations, strict=True)
    ]

    def run(rows: np.ndarray) -> np.ndarray:
        for kernel, bias, activation in layers:
            rows = rows.dot(kernel)
            rows += bias[: len(rows)]
            rows = activation(rows)
        return rows

    return run


class NetworkPart:
    """Base class of torsos, recurrent cores, heads and networks."""

    trackables: Mapping[str, Any] = {}
    """Keras layers and variables that a checkpoint must store, by name."""

    @property
    def trainable_variables(self) -> list[Any]:
        """Keras variables that the optimizer updates."""
        return [
            variable
            for trackable in self.trackables.values()
            for variable in getattr(trackable, "trainable_variables", [trackable])
        ]

    def in_numpy(self, read: Read, num_rows: int) -> Callable[..., Any] | None:
        """Return the NumPy form of `__call__`, or None if there is none.

        Args:
          read: Returns the value of a variable.
          num_rows: Largest number of rows.
        """
        return None


class IdentityTorso(NetworkPart):
    """Returns its input unchanged.

    This is the torso of networks without image layers, and the value head of custom
    models.
    """

    def __call__(self, observation: Any) -> Any:
        """Return the observation unchanged."""
        return observation


class GaussianHead(NetworkPart):
    """Turns network outputs into means and log standard deviations.

    By default, the log standard deviations are trained parameters. With
    `state_dependent_std`, they are the second half of the outputs plus
    `initial_log_std`.
    """

    def __init__(self, output_size: int, config: Config) -> None:
        self._initial = config.initial_log_std
        if not config.state_dependent_std:
            initial = [config.initial_log_std] * output_size
            log_std = keras.Variable(initial, dtype="float32", name="log_std")
            self.trackables = {"log_std": log_std}

    def __call__(self, outputs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return means `[N, A]` and log standard deviations, `[A]` or `[N, A]`."""
        if self.trackables:
            return outputs, self.trackables["log_std"].value
        mean, log_std = tf.split(outputs, 2, axis=1)
        return mean, tf.clip_by_value(self._initial + log_std, -20.0, 2.0)

    def in_numpy(self, read: Read, num_rows: int) -> Callable[..., Any]:
        """Return the NumPy form of `__call__`."""
        if self.trackables:
            shared = np.tile(read(self.trackables["log_std"]), (num_rows, 1))
            return lambda outputs: (outputs, shared[: len(outputs)])
        initial = np.float32(self._initial)

        def split(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mean, log_std = np.split(outputs, 2, axis=1)
            return mean, np.clip(initial + log_std, np.float32(-20), np.float32(2))

        return split


class LogitsHead(NetworkPart):
    """Returns network outputs as logits of discrete or binary actions."""

    def __call__(self, outputs: Any) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (outputs,)

    def in_numpy(self, read: Read, num_rows: int) -> Callable[..., Any]:
        """Return the NumPy form of `__call__`."""
        return self.__call__


class ValueHead(NetworkPart):
    """Returns the only network output as the value: the expected discounted return."""

    def __call__(self, outputs: Any) -> tf.Tensor:
        """Return one value per row, `[N]`."""
        return tf.squeeze(outputs, axis=-1)


class Perceptron(NetworkPart):
    """A perceptron on flattened observations, followed by a head."""

    def __init__(self, input_size: int, *, head: Any, **layers: Any) -> None:
        self._layers, self._head = mlp(input_size, **layers), head
        hidden = [layers["activation"]] * len(layers["hidden_sizes"])
        self._activations = [*hidden, "linear"]
        self.trackables = {"layers": self._layers, **head.trackables}

    def __call__(self, observation: Any) -> Any:
        """Return the outputs of the head, `[N, ...]`."""
        return self._head(self._layers(flatten_observation(observation)))

    def in_numpy(self, read: Read, num_rows: int) -> Callable[[np.ndarray], Any] | None:
        """Return the NumPy form of `__call__`, for flattened observations `[N, D]`."""
        layers = mlp_in_numpy(self._layers, read, num_rows, self._activations)
        head = self._head.in_numpy(read, num_rows)
        if layers is None or head is None:
            return None
        return lambda rows: head(layers(rows))
