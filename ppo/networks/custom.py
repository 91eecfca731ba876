"""Custom networks: a function that the config names, in a module or a file.

    def make(observation_space, action_size, config, seed): ...

It returns a model, which maps observations to what the policy needs and to values; see
`docs/networks.md`. What it returns is tried out before anything is trained.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import keras
import numpy as np
import tensorflow as tf
from gymnasium.vector.utils import create_empty_array

from ppo.config import Config
from ppo.errors import ConfigError, suggestion
from ppo.networks.perceptrons import Part, log_std_variable

__all__ = [
    "CustomGaussian",
    "CustomLogits",
    "CustomModel",
    "CustomValue",
    "load_function",
    "make_custom_model",
]

_TRIAL_ROWS = 2


def load_function(name: str) -> Callable[..., Any]:
    """Return the function `MODULE:FUNCTION` or `PATH/TO/FILE.py:FUNCTION`.

    What the module raises while it is imported arrives as it is.

    Raises:
        ConfigError: there is no such module, file or function.
    """
    source, _, function_name = name.rpartition(":")
    module = _file(source) if source.endswith(".py") else _module(source)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"network: expected a function {function_name} in {source}, found "
            f"{'none' if function is None else repr(function)}."
            f"{suggestion(function_name, names)}"
        )
    return function


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise ConfigError(
            f"network: expected a module {name} to import, found none; check its name "
            "and PYTHONPATH, or give the path of a .py file."
        ) from error


def _file(name: str) -> ModuleType:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"network: expected a Python file {path}, found none in {Path.cwd()}; "
            "start the command where the run was started, or correct the config."
        )
    spec = importlib.util.spec_from_file_location(f"ppo_network_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as for any other import: dataclasses look there
    spec.loader.exec_module(module)
    return module


class CustomModel:
    """A custom model, checked once: observations to outputs and values."""

    def __init__(
        self, model: Any, name: str, input_space: gymnasium.Space[Any], size: int
    ) -> None:
        self._model = model
        self._name = name
        zeros = create_empty_array(input_space, _TRIAL_ROWS, np.zeros)
        outputs = model(tf.nest.map_structure(tf.constant, zeros))
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
        self._check_variables()

    def __call__(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return outputs for the actions, `[N, size]`, and values, `[N]`."""
        output, value = self._model(observation)
        return output, tf.reshape(value, [-1])

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        trackables = getattr(self._model, "trackables", None)
        return {"model": self._model} if trackables is None else dict(trackables)

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes."""
        return list(self._model.trainable_variables)

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


class CustomGaussian(Part):
    """Means that a custom model gave; log standard deviations as usual."""

    def __init__(self, action_size: int, initial_log_std: float) -> None:
        self._log_std = log_std_variable(action_size, initial_log_std)
        self.trackables = {"log_std": self._log_std}

    def __call__(
        self, outputs: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean `[N, A]` and the log standard deviation `[A]`."""
        return outputs[0], self._log_std.value


class CustomLogits(Part):
    """Logits that a custom model gave."""

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor]:
        """Return the logits, `[N, K]`."""
        return (outputs[0],)


class CustomValue(Part):
    """Values that a custom model gave."""

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Return one value per sample, `[N]`."""
        return outputs[1]


def make_custom_model(
    config: Config, input_space: gymnasium.Space[Any], size: int, seed: int
) -> CustomModel:
    """Make and check the model that a config names, of `size` outputs for the actions.

    What the function raises arrives with a note of which one it was.

    Raises:
        ConfigError: there is no such function, or its model does not fit.
    """
    make = load_function(config.network)
    try:
        model = make(input_space, size, config, seed)
        if not callable(model):
            raise ConfigError(
                f"network {config.network}: expected it to return a model, got "
                f"{model!r}."
            )
        return CustomModel(model, config.network, input_space, size)
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"This came from the network {config.network} of the config")
        raise


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
