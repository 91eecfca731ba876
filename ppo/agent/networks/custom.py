"""Custom networks, created by a user function that the config names.

    def make(observation_space, action_size, config, seed): ...

The function returns a model from observations to policy outputs and values. The model
is checked with a small batch before training starts.
"""

from typing import Any

import gymnasium
import keras
import numpy as np
import tensorflow as tf
from gymnasium.vector.utils import create_empty_array

from ppo.agent.networks.perceptrons import NetworkPart
from ppo.agent.trackables import checkpoint_of
from ppo.config.config import Config
from ppo.errors import ConfigError
from ppo.user_code import load_user_code, user_code_errors

_TRIAL_ROWS = 2


class CustomModel:
    """A user's model from observations to policy outputs and values.

    The constructor calls the model with small batches and checks its outputs and
    variables. Rollouts and updates call the model with different batches, so the output
    of a row must depend only on the row and on the trainable variables.

    Args:
      model: The user's model.
      name: Value of the setting `network`, for error messages.
      input_space: Space of the model's input, without the batch axis.
      size: Expected number of policy outputs per row.

    Attributes:
      model: The user's model.
      trackables: Objects that a checkpoint must store, by name.
      trainable_variables: Keras variables that the optimizer updates.
      policy_variables: The model's `policy_variables`, that is, the trainable
        variables of its policy; empty if the model does not have this attribute.

    Raises:
      ConfigError: The outputs or the variables are not as expected.
    """

    def __init__(
        self, model: Any, name: str, input_space: gymnasium.Space[Any], size: int
    ) -> None:
        self.model = model
        self._name = name
        random = np.random.default_rng(0)
        rows = tf.nest.map_structure(
            lambda leaf: tf.constant(random.random(leaf.shape, leaf.dtype)),
            create_empty_array(input_space, _TRIAL_ROWS),
        )
        outputs = model(rows)
        shapes = [tuple(getattr(part, "shape", ())) for part in _items(outputs)]
        expected = [(_TRIAL_ROWS, size), (_TRIAL_ROWS,)]
        if shapes not in (expected, [(_TRIAL_ROWS, size), (_TRIAL_ROWS, 1)]):
            raise ConfigError(
                f"network {name}: expected outputs of shapes [N, {size}] (policy) and "
                f"[N] or [N, 1] (values); got {_describe(outputs)} for "
                f"N = {_TRIAL_ROWS} rows."
            )
        if any(output.dtype != tf.float32 for output in outputs):
            raise ConfigError(
                f"network {name}: expected float32 outputs, got "
                f"{_describe(outputs)}; cast them."
            )
        trackables = getattr(model, "trackables", None)
        self.trackables = {"model": model} if trackables is None else dict(trackables)
        self._check_variables()
        self._check_inference(rows, outputs)
        self.trainable_variables = list(model.trainable_variables)
        self.policy_variables = list(getattr(model, "policy_variables", ()))
        trainable = set(map(id, self.trainable_variables))
        if not trainable.issuperset(map(id, self.policy_variables)):
            raise ConfigError(
                f"network {name}: expected policy_variables to be a subset "
                f"of trainable_variables, got {self.policy_variables!r:.200}."
            )
        # Trace the model, as training does, to reject code that needs concrete values.
        # Tracing does not run the model again.
        tf.function(lambda rows: model(rows)).get_concrete_function(rows)

    def __call__(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return policy outputs `[N, size]` and values `[N]`."""
        output, value = self.model(observation)
        return output, tf.reshape(value, [-1])

    def _check_variables(self) -> None:
        variables = getattr(self.model, "trainable_variables", None)
        is_keras = isinstance(self.model, keras.layers.Layer)
        if not is_keras and not hasattr(self.model, "trackables"):
            raise ConfigError(
                f"network {self._name}: expected a keras.Model or keras.Layer, or an "
                f"object with trackables (a dict for the checkpoint), got "
                f"{self.model!r}."
            )
        if not variables or not all(isinstance(v, keras.Variable) for v in variables):
            raise ConfigError(
                f"network {self._name}: expected trainable_variables, a list of "
                f"keras.Variable, got {list(map(type, variables or ()))}."
            )
        checkpoint = checkpoint_of(self.trackables)
        saved = set(map(id, tf.train.TrackableView(checkpoint).descendants()))
        missing = [v.path for v in variables if id(v) not in saved]
        if missing:
            raise ConfigError(
                f"network {self._name}: expected trackables with all trainable "
                f"variables, but a checkpoint would not store {missing}; add them."
            )

    def _check_inference(self, rows: Any, outputs: Any) -> None:
        is_keras = isinstance(self.model, keras.layers.Layer)
        variables = self.model.variables if is_keras else []
        before = [variable.numpy() for variable in variables]
        repeated = self.model(tf.nest.map_structure(lambda leaf: leaf[:1], rows))
        causes = [
            f"a call changed the variable {variable.path}"
            for variable, value in zip(variables, before, strict=True)
            if not np.array_equal(variable.numpy(), value, equal_nan=True)
        ]
        for first, second in zip(_items(outputs), _items(repeated), strict=True):
            first, second = first.numpy()[:1], second.numpy()
            if np.abs(first - second).max() > 1e-6 + 0.01 * np.abs(first).max():
                causes.append("two calls with the same row had different outputs")
        if causes:
            raise ConfigError(
                f"network {self._name}: expected a model in inference mode, whose "
                f"outputs depend only on the row; {causes[0]}. Call layers without "
                "training=True, and do not combine the rows of a batch."
            )


class CustomHead(NetworkPart):
    """Applies a head to one of the two outputs of a custom model.

    Args:
      index: Index of the output: 0 for the policy, 1 for the value.
      head: The head.
    """

    def __init__(self, index: int, head: Any) -> None:
        self._index, self._head = index, head
        self.trackables = head.trackables

    def __call__(self, outputs: tuple[tf.Tensor, tf.Tensor]) -> Any:
        """Return the parameters of the action distribution, or values `[N]`."""
        return self._head(outputs[self._index])


def make_custom_model(
    config: Config, input_space: gymnasium.Space[Any], size: int, seed: int
) -> CustomModel:
    """Create and check the custom model of a config.

    Args:
      config: The config, which names the function.
      input_space: Space of the model's input, without the batch axis.
      size: Number of policy outputs per row.
      seed: Seed of the weights.

    Raises:
      ConfigError: The function does not exist or raises, or its model has unexpected
        outputs or variables.
    """
    make = load_user_code("network", config.network)
    with user_code_errors(f"network {config.network}", make):
        model = make(input_space, size, config, seed)
        if not callable(model):
            raise ConfigError(
                f"network {config.network}: expected the function to return a model, "
                f"got {model!r}."
            )
        return CustomModel(model, config.network, input_space, size)


def _items(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _describe(outputs: Any) -> str:
    parts = [
        f"{getattr(output, 'dtype', type(output)).name}{list(output.shape)}"
        if hasattr(output, "shape")
        else type(output).__name__
        for output in _items(outputs)
    ]
    return ", ".join(parts) or "nothing"
