"""Convolutional networks for images, and the torso that applies them.

Images of at least 36x36 pixels are processed by the network of Mnih et al. 2015
("Nature-CNN"), smaller ones by layers with smaller kernels and strides.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import keras
import tensorflow as tf
from gymnasium.spaces import flatdim

from ppo.agent.networks.perceptrons import NetworkPart, flatten_observation
from ppo.spaces import image_axes, is_image

_LARGE_SIDE = 36  # the smallest side for which Nature-CNN's last layer has an output
# Number of filters, kernel size and stride of each layer.
_LARGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_SMALL = ((16, 3, 1), (32, 3, 2), (32, 3, 2))
_LARGE_FEATURES = 512
_SMALL_FEATURES = 128


def channels_last(images: tf.Tensor) -> tf.Tensor:
    """Transpose and reshape images to the layout that convolutional layers expect.

    `image_axes` determines the channel axis. Stacked frames become channels.

    Args:
      images: `[N, H, W]`, `[N, H, W, C]`, `[N, C, H, W]`, `[N, S, H, W, C]` or
        `[N, S, C, H, W]`, where S is the number of stacked frames.

    Returns:
      `[N, H, W, channels]`.
    """
    shape = tuple(images.shape[1:])
    height, width, channels = image_axes(shape)
    order = [axis + 1 for axis in (height, width, *channels)]
    if order != list(range(1, len(order) + 1)):
        images = tf.transpose(images, [0, *order])
    count = math.prod(shape[axis] for axis in channels)
    if len(channels) != 1:
        images = tf.reshape(images, [-1, shape[height], shape[width], count])
    return images


def convolution(shape: Sequence[int], *, seed: int) -> keras.Sequential:
    """Create the convolutional network for images of one shape.

    Layers have orthogonal weights with gain sqrt(2), zero biases and ReLU activations.

    Args:
      shape: Shape of an image, in any layout that `channels_last` accepts.
      seed: Seed of the weights; the index of the layer is added to it.

    Returns:
      A model from float32 `[N, H, W, channels]` to features, 512 for large images and
      128 for small ones.
    """
    height, width, channels = image_axes(tuple(shape))
    sides = shape[height], shape[width]
    is_large = min(sides) >= _LARGE_SIDE
    initializers = [
        keras.initializers.Orthogonal(gain=math.sqrt(2.0), seed=seed + index)
        for index in range(4)
    ]
    count = math.prod(shape[axis] for axis in channels)
    layers: list[Any] = [keras.Input((*sides, count), dtype="float32")]
    for (filters, kernel, stride), initializer in zip(
        _LARGE if is_large else _SMALL, initializers, strict=False
    ):
        layers.append(
            keras.layers.Conv2D(
                filters,
                kernel,
                stride,
                padding="valid" if is_large else "same",
                activation="relu",
                kernel_initializer=initializer,
                data_format="channels_last",
                dtype="float32",
            )
        )
    features = keras.layers.Dense(
        _LARGE_FEATURES if is_large else _SMALL_FEATURES,
        activation="relu",
        kernel_initializer=initializers[-1],
        dtype="float32",
    )
    flatten = keras.layers.Flatten(data_format="channels_last", dtype="float32")
    return keras.Sequential([*layers, flatten, features])


class ImageTorso(NetworkPart):
    """Applies a convolutional network to each image, and appends other observations.

    Args:
      spaces: Spaces of the leaves of the observation.
      seed: Seed of the weights.

    Attributes:
      size: Number of features.
    """

    def __init__(self, spaces: Sequence[gymnasium.Space[Any]], seed: int) -> None:
        self._networks = [
            convolution(tuple(space.shape or ()), seed=seed + 10 * index)
            if is_image(space)
            else None
            for index, space in enumerate(spaces)
        ]
        self.trackables = {
            f"leaf_{index}": network
            for index, network in enumerate(self._networks)
            if network is not None
        }
        self.size = sum(
            flatdim(space) if network is None else int(network.output_shape[-1])
            for network, space in zip(self._networks, spaces, strict=True)
        )

    def __call__(self, observation: Any) -> tf.Tensor:
        """Return the concatenated features of all leaves, float32 `[N, size]`."""
        leaves = tf.nest.flatten(observation)
        features = [
            leaf if network is None else network(channels_last(leaf))
            for leaf, network in zip(leaves, self._networks, strict=True)
        ]
        return flatten_observation(features)
