"""Convolutional networks for images, and what joins them with other observations.

Sides of at least 36 pixels get the network of Mnih et al. 2015 ("Nature-CNN"), smaller
ones layers whose kernels and strides leave something to see.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import keras
import tensorflow as tf
from gymnasium.spaces import flatdim

from ppo.agent.networks.perceptrons import NetworkPart, flatten_observation
from ppo.images import can_convolve, image_axes

_LARGE_SIDE = 36  # the first from which Nature-CNN's last layer has an output
_LARGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # filters, kernel, stride
_SMALL = ((16, 3, 1), (32, 3, 2), (32, 3, 2))
_LARGE_FEATURES = 512
_SMALL_FEATURES = 128


def channels_last(images: tf.Tensor) -> tf.Tensor:
    """Bring images into the order that convolutions take.

    Channels are the first or last of three axes, whichever is shorter; the last if
    both are alike. A fourth axis in front is a stack of frames.

    Args:
        images: `[N, H, W]`, `[N, H, W, C]`, `[N, C, H, W]`, `[N, S, H, W, C]` or
            `[N, S, C, H, W]`.

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
    """Build the network for images of one shape.

    Orthogonal weights of gain sqrt(2), zero biases, rectified linear units.

    Args:
        shape: of an image, in any order that `channels_last` knows.
        seed: layers add their index to it.

    Returns:
        Maps float32 `[N, H, W, channels]` to features, 512 of a large image and 128 of
        a small one.
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
            )
        )
    layers.append(keras.layers.Flatten())
    layers.append(
        keras.layers.Dense(
            _LARGE_FEATURES if is_large else _SMALL_FEATURES,
            activation="relu",
            kernel_initializer=initializers[-1],
        )
    )
    return keras.Sequential(layers)


class ImageTorso(NetworkPart):
    """A convolutional network per image; what else is observed goes past them.

    Args:
        spaces: leaves of the observation space.
        seed: of the weights.
    """

    def __init__(self, spaces: Sequence[gymnasium.Space[Any]], seed: int) -> None:
        self._networks = [
            convolution(tuple(space.shape or ()), seed=seed + 10 * index)
            if can_convolve(space)
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
        """Return the features of all leaves, float32 `[N, size]`."""
        leaves = tf.nest.flatten(observation)
        features = [
            leaf if network is None else network(channels_last(leaf))
            for leaf, network in zip(leaves, self._networks, strict=True)
        ]
        return flatten_observation(features)
