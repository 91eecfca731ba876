"""Find images among observations, and their height, width and channel axes."""

from typing import Any

import gymnasium
import numpy as np

_SMALLEST_SIDE = 8


def is_image(space: gymnasium.Space[Any]) -> bool:
    """Return whether a leaf of an observation space is an image for convolutions.

    An image is a uint8 Box [0, 255] with 2 to 4 axes and at least 8x8 pixels. Smaller
    uint8 Boxes are treated like any other Box.
    """
    if not (
        isinstance(space, gymnasium.spaces.Box)
        and space.dtype == np.uint8
        and 2 <= len(space.shape) <= 4
        and bool((space.low == 0).all() and (space.high == 255).all())
    ):
        return False
    height, width, _ = image_axes(space.shape)
    return min(space.shape[height], space.shape[width]) >= _SMALLEST_SIDE


def image_axes(shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Return the axes of height, width and channels of an image.

    With three axes, the channel axis is the first or the last, whichever is shorter, or
    the last if both are equal. With four axes, the first axis is a stack of frames, and
    the frames count as channels.
    """
    if len(shape) == 2:
        return 0, 1, ()
    first, last = len(shape) - 3, len(shape) - 1
    stack = tuple(range(first))
    if shape[first] < shape[last]:
        return first + 1, last, (*stack, first)
    return first, first + 1, (*stack, last)
