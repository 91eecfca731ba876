"""Check the spaces of envs, and find images among observations.

This module does not import TensorFlow, so that `ppo train` can reject spaces before it
loads TensorFlow.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from envserve.spaces.leaves import FIXED_SHAPE_KINDS, kind_of
from ppo.errors import UnsupportedSpaceError

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


def leaf_kind(space: gymnasium.Space[Any]) -> str | None:
    """Return the kind of a leaf, such as "image"; None if its space is unsupported."""
    kind = "image" if is_image(space) else kind_of(space)
    return kind if kind in ("image", *FIXED_SHAPE_KINDS) else None


def space_leaves(space: gymnasium.Space[Any], path: str = "observation") -> Any:
    """Turn Dict and Tuple spaces into dicts and tuples of their leaf spaces.

    Returns:
      A `tf.nest` structure whose leaves are Box, Discrete, MultiBinary or
      MultiDiscrete spaces.

    Raises:
      UnsupportedSpaceError: A leaf is any other kind of space, or has no elements.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return {
            name: space_leaves(part, f"{path}[{name!r}]")
            for name, part in space.spaces.items()
        }
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(
            space_leaves(part, f"{path}[{index}]")
            for index, part in enumerate(space.spaces)
        )
    remedy = (
        "remove it with the wrapper FilterObservation (filter_keys lists the keys to "
        "keep), or wrap the env to encode it as a Box."
    )
    if leaf_kind(space) is None:
        raise UnsupportedSpaceError(
            f"{path}: expected Box, Discrete, MultiBinary, MultiDiscrete, or a Dict or "
            f"Tuple of those, got {space}; {remedy}"
        )
    if 0 in (space.shape or ()):
        raise UnsupportedSpaceError(
            f"{path}: expected at least one element, got {space}; {remedy}"
        )
    return space


def observation_leaves(space: gymnasium.Space[Any]) -> Any:
    """Return `space_leaves` of an observation space.

    Raises:
      UnsupportedSpaceError: The space is not supported, or has no leaves.
    """
    leaves = space_leaves(space)
    if not any(True for _ in flat_leaves(leaves)):
        raise UnsupportedSpaceError(
            f"observation: expected at least one element, got {space}; wrap the env to "
            "add an observation, such as a Box that is always 0."
        )
    return leaves


def check_spaces(
    algorithm: str,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Check the types of the spaces of one env.

    Args:
      algorithm: The setting `algorithm`; "sac" supports fewer spaces.
      observation_space: The observation space.
      action_space: The action space.

    Raises:
      UnsupportedSpaceError: A space is not supported.
    """
    leaves = list(flat_leaves(observation_leaves(observation_space)))
    if algorithm == "sac" and (
        not isinstance(action_space, gymnasium.spaces.Box)
        or action_space.dtype.kind != "f"
        or not action_space.is_bounded()
        or any(map(is_image, leaves))
    ):
        raise UnsupportedSpaceError(
            "algorithm sac: expected a Box action space of floats with finite bounds, "
            f"and observations without images, got the action space {action_space} and "
            f"the observation space {observation_space}; train with algorithm=ppo."
        )
    check_action_space(action_space)


def check_action_space(space: gymnasium.Space[Any]) -> None:
    """Check the type of an action space, and that it has at least one element.

    Raises:
      UnsupportedSpaceError: The space is not supported.
    """
    if leaf_kind(space) is None:
        raise UnsupportedSpaceError(
            "Action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got "
            f"{space}; wrap the env so that its actions are one of these."
        )
    if 0 in (space.shape or ()):
        raise UnsupportedSpaceError(
            f"Action space: expected at least one element, got {space}; if there is "
            "nothing to choose, use a Discrete(1)."
        )
    if isinstance(space, gymnasium.spaces.Box) and space.dtype == bool:
        raise UnsupportedSpaceError(
            f"Action space: expected a numeric Box, got {space}; for bits, use a "
            "MultiBinary."
        )


def flat_leaves(structure: Any) -> Iterator[gymnasium.Space[Any]]:
    """Yield the leaves of the result of `space_leaves`."""
    if isinstance(structure, dict | tuple):
        parts = structure.values() if isinstance(structure, dict) else structure
        for part in parts:
            yield from flat_leaves(part)
    else:
        yield structure
