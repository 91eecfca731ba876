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

from ppo.config.config import Config


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


class NetworkPart:
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


class IdentityTorso(NetworkPart):
    """Leaves observations as they are; the networks behind it join their leaves."""

    def __call__(self, observation: Any) -> Any:
        """Return the observation."""
        return observation


class GaussianHead(NetworkPart):
    """Turns outputs of a network into means and log standard deviations.

    The latter are parameters that do not depend on the observation; or, if they are
    state-dependent, the second half of the outputs added to what they are initially.
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


class LogitsHead(NetworkPart):
    """Takes outputs for logits: of a choice, of several choices, or of bits."""

    def __call__(self, outputs: Any) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (outputs,)


class ValueHead(NetworkPart):
    """Takes the only output for a value: the expected discounted return."""

    def __call__(self, outputs: Any) -> tf.Tensor:
        """Return one value per sample, `[N]`."""
        return tf.squeeze(outputs, axis=-1)


class Perceptron(NetworkPart):
    """A perceptron on the joined leaves of observations, and the head behind it."""

    def __init__(self, input_size: int, *, head: Any, **layers: Any) -> None:
        self._layers, self._head = mlp(input_size, **layers), head
        self.trackables = {"layers": self._layers, **head.trackables}

    def __call__(self, observation: Any) -> Any:
        """Return what the head makes of it, `[N, ...]`."""
        return self._head(self._layers(flatten_observation(observation)))
