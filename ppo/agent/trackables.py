"""Find everything in an object that a checkpoint must store."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ppo.errors import ConfigError


def checkpoint_of(trackables: Mapping[str, Any]) -> tf.train.Checkpoint:
    """Return a checkpoint of objects that includes all weights of their Keras layers.

    By itself, TensorFlow does not find the layers and weights that a layer has in lists
    and dicts.

    Raises:
      ConfigError: A set contains layers that no attribute contains. Because its order
        differs between processes, weights could be swapped when they are restored.
    """
    checkpoint = tf.train.Checkpoint(**trackables)
    parts = tf.train.TrackableView(checkpoint).descendants()
    found = set(map(id, parts))
    for layer in _layers_in_sets(parts, set()):
        if id(layer) not in found:
            raise ConfigError(
                f"{type(layer).__name__} {layer.name}: expected the layers of a model "
                "in attributes, lists, tuples or dicts, found this layer in a set, "
                "which has no fixed order; use a list."
            )
    missing = {
        id(weight): weight
        for part in parts
        if isinstance(part, keras.layers.Layer)
        for weight in part.weights
        if id(weight) not in found
    }
    if missing:
        checkpoint.untracked_keras_weights = list(missing.values())
    return checkpoint


def _layers_in_sets(
    value: Any, searched: set[int], *, is_in_set: bool = False
) -> Iterator[keras.layers.Layer]:
    """Yield the layers that sets contain, at any depth of the parts of an object.

    Args:
      value: A layer, a module, a collection of these, or any other object.
      searched: Ids of the objects that were already searched.
      is_in_set: Whether the object is in a set.
    """
    parts: Iterable[Any] = ()
    if isinstance(value, keras.layers.Layer | tf.Module):
        if is_in_set and isinstance(value, keras.layers.Layer):
            yield value
        parts, is_in_set = vars(value).values(), False
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts, is_in_set = value, is_in_set or isinstance(value, set | frozenset)
    if id(value) in searched:
        return
    searched.add(id(value))
    for part in parts:
        yield from _layers_in_sets(part, searched, is_in_set=is_in_set)
