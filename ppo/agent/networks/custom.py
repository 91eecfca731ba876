"""Custom networks: a function that the config names, in a module or a file.

    def make(observation_space, action_size, config, seed): ...

It returns a model, which maps observations to what the policy needs and to values; see
`docs/networks.md`. What it returns is tried out before anything is trained.
"""

from typing import Any

import gymnasium
import keras
import numpy as np
import tensorflow as tf
from gymnasium.vector.utils import create_empty_array

from ppo.agent.networks.perceptrons import NetworkPart
from ppo.config.config import Config
from ppo.errors import ConfigError
from ppo.user_code import user_code_errors, load_user_code

_TRIAL_ROWS = 2


class CustomModel:
    """A custom model, checked once: observations to outputs and values.

    Attributes:
        trackables: Objects that a checkpoint must store, by name.
        trainable_variables: The Keras variables that the optimizer changes.
    """

    def __init__(
        self, model: Any, name: str, input_space: gymnasium.Space[Any], size: int
    ) -> None:
        self._model = model
        self._name = name
        zeros = create_empty_array(input_space, _TRIAL_ROWS, np.zeros)
        rows = tf.nest.map_structure(tf.constant, zeros)
        outputs = model(rows)
        shapes = [tuple(getattr(part, "shape", ())) for part in _items(outputs)]
        flat = [(_TRIAL_ROWS, size), (_TRIAL_ROWS,)]
        if shapes not in (flat, [(_TRIAL_ROWS, size), (_TRIAL_ROWS, 1)]):
            raise ConfigError(
                f"network {name}: expected outputs of shapes [N, {size}], for the "
                f"actions, and [N] or [N, 1], for the values; for N = {_TRIAL_ROWS} "
                f"rows got {_described(outputs)}."
            )
        if any(output.dtype != tf.float32 for output in outputs):
            raise ConfigError(
                f"network {name}: expected outputs of float32, got "
                f"{_described(outputs)}; cast them."
            )
        trackables = getattr(model, "trackables", None)
        self.trackables = {"model": model} if trackables is None else dict(trackables)
        self._check_variables()
        self.trainable_variables = list(model.trainable_variables)
        # As in training, whose graphs know no values; nothing is run again.
        tf.function(lambda rows: model(rows)).get_concrete_function(rows)

    def __call__(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return outputs for the actions, `[N, size]`, and values, `[N]`."""
        output, value = self._model(observation)
        return output, tf.reshape(value, [-1])

    def _check_variables(self) -> None:
        variables = getattr(self._model, "trainable_variables", None)
        is_keras = isinstance(self._model, keras.layers.Layer)
        if not is_keras and not hasattr(self._model, "trackables"):
            raise ConfigError(
                f"network {self._name}: expected a keras.Model or keras.Layer, or an "
                f"object with trackables (a dict for the checkpoint), got "
                f"{self._model!r}."
            )
        if not variables or not all(isinstance(v, keras.Variable) for v in variables):
            raise ConfigError(
                f"network {self._name}: expected trainable_variables, a list of "
                f"keras.Variable, got {variables!r}."
            )
        checkpoint = tf.train.Checkpoint(**self.trackables)
        saved = set(map(id, tf.train.TrackableView(checkpoint).descendants()))
        missing = [v.path for v in variables if id(v) not in saved]
        if missing:
            raise ConfigError(
                f"network {self._name}: expected trackables that hold all trainable "
                f"variables, but a checkpoint would forget {missing}; add them."
            )


class CustomHead(NetworkPart):
    """What a head makes of one of the two outputs of a custom model."""

    def __init__(self, index: int, head: Any) -> None:
        self._index, self._head = index, head
        self.trackables = head.trackables

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> Any:
        """Return parameters of an action distribution, or values `[N]`."""
        return self._head(outputs[self._index])


def make_custom_model(
    config: Config, input_space: gymnasium.Space[Any], size: int, seed: int
) -> CustomModel:
    """Make and check the model that a config names, of `size` outputs for the actions.

    Raises:
        ConfigError: there is no such function, it raises, or its model does not fit.
    """
    make = load_user_code("network", config.network)
    with user_code_errors(f"network {config.network}", make):
        model = make(input_space, size, config, seed)
        if not callable(model):
            raise ConfigError(
                f"network {config.network}: expected it to return a model, got "
                f"{model!r}."
            )
        return CustomModel(model, config.network, input_space, size)


def _items(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _described(outputs: Any) -> str:
    parts = [
        f"{getattr(output, 'dtype', type(output)).name}{list(output.shape)}"
        if hasattr(output, "shape")
        else repr(output)
        for output in _items(outputs)
    ]
    return ", ".join(parts) or "nothing"
