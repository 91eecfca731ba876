"""Policy and value networks: multilayer perceptrons of Keras layers.

A network takes what its torso gave, or where there is none preprocessed observations (a
float32 array or a nest of them, a row per sample), and gives the parameters of an
action distribution, or values. To add a kind, write a class with `__call__`,
`trackables` and `trainable_variables`; nothing else knows the layers inside.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

__all__ = [
    "CategoricalNetwork",
    "GaussianNetwork",
    "NoTorso",
    "OwnGaussian",
    "OwnLogits",
    "OwnValue",
    "ValueNetwork",
    "flatten_observation",
    "mlp",
]


def flatten_observation(observation: Any) -> tf.Tensor:
    """Join the leaves of an observation into one vector per sample.

    Args:
        observation: a float32 tensor `[N, ...]` or a nest (dict, tuple) of them.

    Returns:
        float32 `[N, D]`, leaves in the order of `tf.nest.flatten`.
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
    """Build a perceptron with orthogonal weights and zero biases.

    Hidden layers have gain sqrt(2), the last one `output_gain` and no activation.
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
            )
        )
    return keras.Sequential(layers)


class NoTorso:
    """Leaves observations as they are; the networks behind it join their leaves."""

    trackables: Mapping[str, Any] = {}
    """What a checkpoint must hold, by name."""

    trainable_variables: Sequence[Any] = ()
    """The Keras variables that the optimizer changes."""

    def __call__(self, observation: Any) -> Any:
        """Return the observation."""
        return observation


class GaussianNetwork:
    """Means from a perceptron; one log standard deviation per action dimension.

    The log standard deviations are parameters that do not depend on the observation.
    """

    def __init__(
        self,
        input_size: int,
        action_size: int,
        *,
        hidden_sizes: Sequence[int],
        activation: str,
        initial_log_std: float,
        seed: int,
    ) -> None:
        self._mean = mlp(
            input_size,
            hidden_sizes,
            action_size,
            output_gain=0.01,
            activation=activation,
            seed=seed,
        )
        self._log_std = keras.Variable(
            [initial_log_std] * action_size, dtype="float32", name="log_std"
        )

    def __call__(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean `[N, A]` and the log standard deviation `[A]`."""
        return self._mean(flatten_observation(observation)), self._log_std.value

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        return {"mean": self._mean, "log_std": self._log_std}

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return [*self._mean.trainable_variables, self._log_std]


class CategoricalNetwork:
    """Logits: of the actions of a Discrete space, of several choices, or of bits."""

    def __init__(
        self,
        input_size: int,
        num_actions: int,
        *,
        hidden_sizes: Sequence[int],
        activation: str,
        seed: int,
    ) -> None:
        self._logits = mlp(
            input_size,
            hidden_sizes,
            num_actions,
            output_gain=0.01,
            activation=activation,
            seed=seed,
        )

    def __call__(self, observation: Any) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (self._logits(flatten_observation(observation)),)

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        return {"logits": self._logits}

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return list(self._logits.trainable_variables)


class ValueNetwork:
    """Expected discounted return of an observation."""

    def __init__(
        self,
        input_size: int,
        *,
        hidden_sizes: Sequence[int],
        activation: str,
        seed: int,
    ) -> None:
        self._value = mlp(
            input_size,
            hidden_sizes,
            1,
            output_gain=1.0,
            activation=activation,
            seed=seed,
        )

    def __call__(self, observation: Any) -> tf.Tensor:
        """Return one value per sample, `[N]`."""
        return tf.squeeze(self._value(flatten_observation(observation)), axis=-1)

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        return {"value": self._value}

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return list(self._value.trainable_variables)


class OwnGaussian:
    """Means that a model of one's own gave; log standard deviations as usual."""

    def __init__(self, action_size: int, initial_log_std: float) -> None:
        self._log_std = keras.Variable(
            [initial_log_std] * action_size, dtype="float32", name="log_std"
        )

    def __call__(
        self, outputs: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean `[N, A]` and the log standard deviation `[A]`."""
        return outputs[0], self._log_std.value

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        return {"log_std": self._log_std}

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return [self._log_std]


class OwnLogits(NoTorso):
    """Logits that a model of one's own gave."""

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (outputs[0],)


class OwnValue(NoTorso):
    """Values that a model of one's own gave."""

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Return one value per sample, `[N]`."""
        return outputs[1]
