"""Valid and faulty custom networks for tests."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

not_a_function = 3


def inputs_of_a_dict(
    observation_space: Any, action_size: int, config: Any, seed: int
) -> keras.Model:
    """Return a functional model."""
    inputs = {
        name: keras.Input(space.shape, name=name)
        for name, space in observation_space.items()
    }
    flat = [keras.layers.Flatten()(part) for part in inputs.values()]
    start = keras.initializers.GlorotUniform(seed)
    joined = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=start)(joined)
    logits = keras.layers.Dense(action_size, kernel_initializer=start)(hidden)
    value = keras.layers.Dense(1, kernel_initializer=start)(hidden)
    return keras.Model(inputs, (logits, value))


class Linear(keras.Model):
    """A model whose variables are created by its first call."""

    def __init__(self, action_size: int, seed: int) -> None:
        super().__init__()
        start = keras.initializers.GlorotUniform(seed)
        self.action = keras.layers.Dense(action_size, kernel_initializer=start)
        self.value = keras.layers.Dense(1, kernel_initializer=start)

    def call(self, observation: Any) -> Any:
        observation = keras.layers.Flatten()(observation)
        return self.action(observation), self.value(observation)[:, 0]


class Stack(keras.Model):
    """A model with layers in a list."""

    def __init__(self, action_size: int, seed: int, stack: list[Any]) -> None:
        super().__init__()
        self.stack = stack
        self.head = Linear(action_size, seed)

    def call(self, observation: Any) -> Any:
        for layer in self.stack:
            observation = layer(observation)
        return self.head(observation)


def layers_in_a_list(
    space: Any, action_size: int, config: Any, seed: int
) -> keras.Model:
    start = keras.initializers.GlorotUniform(seed)
    stack = [keras.layers.Dense(n, kernel_initializer=start) for n in (8, 4)]
    return Stack(action_size, seed, stack)


class Parallel(keras.layers.Layer):
    """A layer with layers in a set or frozenset, which is in a dict."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.parts = {"all": kind([keras.layers.Dense(8), keras.layers.Dense(8)])}

    def build(self, shape: Any) -> None:
        for part in self.parts["all"]:
            part.build(shape)

    def call(self, observation: Any) -> Any:
        return sum(part(observation) for part in self.parts["all"])


def layers_in_a_set(space: Any, size: int, config: Any, seed: int) -> keras.Model:
    return Stack(size, seed, [Parallel(set)])


def layers_in_a_frozenset(space: Any, size: int, config: Any, seed: int) -> keras.Model:
    return Stack(size, seed, [Parallel(frozenset)])


class Unusual(keras.Model):
    """A model with an embedding, a float64 and an unused layer, and a set of layers."""

    def __init__(self, action_size: int, seed: int) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(2, 4)
        self.wide = keras.layers.Dense(4, dtype="float64")
        self.unused = keras.layers.Dense(1, name="unused")
        self.head = Linear(action_size, seed)
        self.narrow = {self.table, self.head}  # layers that attributes contain too

    def call(self, observation: Any) -> Any:
        code = tf.cast(observation[:, 0] > 0, tf.int32)
        wide = tf.cast(self.wide(observation), tf.float32)
        self.unused(wide)
        return self.head(self.table(code) + wide)


def unusual(space: Any, action_size: int, config: Any, seed: int) -> keras.Model:
    return Unusual(action_size, seed)


class Printing(Linear):
    """A model that XLA cannot compile."""

    def call(self, observation: Any) -> Any:
        tf.print("rows", tf.shape(observation)[0])
        return super().call(observation)


def printing(space: Any, action_size: int, config: Any, seed: int) -> keras.Model:
    return Printing(action_size, seed)


def subclass(space: Any, action_size: int, config: Any, seed: int) -> keras.Model:
    return Linear(action_size, seed)


class Plain:
    """A model without Keras layers, with the attributes that the trainer needs."""

    def __init__(self, input_size: int, action_size: int) -> None:
        self._kernel = keras.Variable(tf.ones([input_size, action_size + 1]))
        self.trainable_variables = [self._kernel]
        self.trackables = {"kernel": self._kernel}

    def __call__(self, observation: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if tf.reduce_any(observation > 1e6):  # AutoGraph makes this a tf.cond
            observation = tf.clip_by_value(observation, -1e6, 1e6)
        product = tf.matmul(observation, self._kernel.value)
        return product[:, :-1], product[:, -1]


def with_named_policy(
    space: Any, action_size: int, config: Any, seed: int
) -> keras.Model:
    model = inputs_of_a_dict({"x": space}, action_size, config, seed)
    hidden = keras.layers.Dense(8, "tanh")(model.inputs[0])
    model = keras.Model(
        model.inputs[0], (model.outputs[0], keras.layers.Dense(1)(hidden))
    )
    policy = keras.Model(model.inputs, model.outputs[0])
    model.policy_variables = policy.trainable_variables
    return model


def with_foreign_policy(
    space: Any, action_size: int, config: Any, seed: int
) -> keras.Model:
    model = subclass(space, action_size, config, seed)
    model(tf.zeros([1, *space.shape]))
    vars(model)["policy_variables"] = [keras.Variable(0.0)]
    return model


def with_layer(layer: Any, space: Any, action_size: int, **named: Any) -> keras.Model:
    rows = keras.Input(space.shape)
    hidden = layer(keras.layers.Dense(8, "tanh")(rows), **named)
    outputs = keras.layers.Dense(action_size)(hidden), keras.layers.Dense(1)(hidden)
    return keras.Model(rows, outputs)


def without_training(space: Any, action_size: int, *_: Any) -> keras.Model:
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    return with_layer(keras.Sequential(layers), space, action_size)


def dropout(space: Any, action_size: int, *_: Any) -> keras.Model:
    return with_layer(keras.layers.Dropout(0.1), space, action_size, training=True)


def normalization(space: Any, action_size: int, *_: Any) -> keras.Model:
    layer = keras.layers.BatchNormalization(momentum=1.0)
    return with_layer(layer, space, action_size, training=True)


def random(space: Any, action_size: int, *_: Any) -> keras.Model:
    noise = keras.layers.Lambda(lambda rows: rows + tf.random.normal(tf.shape(rows)))
    return with_layer(noise, space, action_size)


def plain_object(space: Any, action_size: int, *_: Any) -> Plain:
    return Plain(space.shape[0], action_size)


def with_empty_trackables(space: Any, action_size: int, *_: Any) -> Plain:
    model = Plain(space.shape[0], action_size)
    model.trackables = {}
    return model


def too_few_outputs(_: Any, action_size: int, config: Any, seed: int) -> keras.Model:
    return Linear(action_size - 1, seed)


def one_output(space: Any, action_size: int, *_: Any) -> Any:
    return keras.Sequential([keras.layers.Dense(action_size)])


def dict_of_outputs(*_: Any) -> Any:
    return lambda rows: {"action": rows, "value": rows[:, 0]}


def with_variables_of_tensorflow(space: Any, action_size: int, *_: Any) -> Plain:
    model = Plain(space.shape[0], action_size)
    model.trainable_variables = [tf.Variable(tf.ones([2, 2]))]
    return model


def returns_none(*_: Any) -> None:
    return None


def raising(*_: Any) -> Any:
    raise KeyError("camera")


def without_checkpoint(space: Any, action_size: int, config: Any, seed: int) -> Any:
    return Linear(action_size, seed).__call__


def without_variables(space: Any, action_size: int, config: Any, seed: int) -> Any:
    model = Linear(action_size, seed)
    model.trainable = False
    return model


class OnlyEager(Linear):
    """A model that needs concrete values, so it cannot be traced."""

    def call(self, observation: Any) -> Any:
        return super().call(np.asarray(observation))


def only_eager(space: Any, action_size: int, config: Any, seed: int) -> keras.Model:
    return OnlyEager(action_size, seed)


def float64(space: Any, action_size: int, *_: Any) -> Any:
    def call(observation: tf.Tensor) -> Any:
        rows = tf.cast(observation, tf.float64)
        return tf.repeat(rows[:, :1], action_size, axis=1), rows[:, 0]

    return call
