"""Policy and value networks: multilayer perceptrons of Keras layers.

A network takes what its torso gave, or where there is none preprocessed observations (a
float32 array or a nest of them, a row per sample), and gives the parameters of an
action distribution, or values. To add a kind, write a `Part` with `__call__`; nothing
else knows the layers inside.
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
    "Part",
    "ValueNetwork",
    "flatten_observation",
    "log_std_variable",
    "mlp",
]


def flatten_observation(observation: Any) -> tf.Tensor:
    """Join leaves, float32 `[N, ...]`, into one vector per sample, `[N, D]`.

    Their order is that of `tf.nest.flatten`.
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


class Part:
    """Something that an agent thinks with."""

    trackables: Mapping[str, Any] = {}
    """What a checkpoint must hold, by name: Keras layers and variables."""

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return [
            variable
            for trackable in self.trackables.values()
            for variable in getattr(trackable, "trainable_variables", [trackable])
        ]


class NoTorso(Part):
    """Leaves observations as they are; the networks behind it join their leaves."""

    def __call__(self, observation: Any) -> Any:
        """Return the observation."""
        return observation


class _Network(Part):
    """A perceptron on the joined leaves of observations."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        output_gain: float = 0.01,
        **layers: Any,
    ) -> None:
        self._layers = mlp(
            input_size, output_size=output_size, output_gain=output_gain, **layers
        )
        self.trackables = {"layers": self._layers}

    def _outputs(self, observation: Any) -> tf.Tensor:
        return self._layers(flatten_observation(observation))


class GaussianNetwork(_Network):
    """Means from a perceptron; one log standard deviation per action dimension.

    The log standard deviations are parameters that do not depend on the observation.
    """

    def __init__(
        self,
        input_size: int,
        action_size: int,
        *,
        initial_log_std: float,
        **layers: Any,
    ) -> None:
        super().__init__(input_size, action_size, **layers)
        self._log_std = log_std_variable(action_size, initial_log_std)
        self.trackables = {**self.trackables, "log_std": self._log_std}

    def __call__(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean `[N, A]` and the log standard deviation `[A]`."""
        return self._outputs(observation), self._log_std.value


class CategoricalNetwork(_Network):
    """Logits: of the actions of a Discrete space, of several choices, or of bits."""

    def __call__(self, observation: Any) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (self._outputs(observation),)


class ValueNetwork(_Network):
    """Expected discounted return of an observation."""

    def __init__(self, input_size: int, **layers: Any) -> None:
        super().__init__(input_size, 1, output_gain=1.0, **layers)

    def __call__(self, observation: Any) -> tf.Tensor:
        """Return one value per sample, `[N]`."""
        return tf.squeeze(self._outputs(observation), axis=-1)


def log_std_variable(action_size: int, initial: float) -> keras.Variable:
    """Return log standard deviations that are parameters, `[A]`."""
    return keras.Variable([initial] * action_size, dtype="float32", name="log_std")
