"""Find everything in an object that a checkpoint must store."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf


def checkpoint_of(trackables: Mapping[str, Any]) -> tf.train.Checkpoint:
    """Return a checkpoint of objects that includes all weights of their Keras layers.

    By itself, TensorFlow does not find the layers and weights that a layer has in lists
    and dicts.
    """
    checkpoint = tf.train.Checkpoint(**trackables)
    parts = tf.train.TrackableView(checkpoint).descendants()
    found = set(map(id, parts))
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
