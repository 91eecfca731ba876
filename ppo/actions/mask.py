"""Action masks: flags in a Dict observation that say which actions are allowed.

They stand under the key `action_mask` of the outermost Dict, as in PettingZoo, one flag
per action. For MultiDiscrete they are those of all choices in a row, as in SB3-contrib,
or a Tuple with the flags of each choice, as `MultiDiscrete.sample` takes them.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import tensorflow as tf

from ppo.errors import UnsupportedSpaceError

__all__ = ["MASK_KEY", "check_mask", "has_mask", "joined_flags", "without_mask"]

MASK_KEY = "action_mask"

_FLAGS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)


def has_mask(space: gymnasium.Space[Any]) -> bool:
    """Whether observations of this space come with an action mask."""
    return isinstance(space, gymnasium.spaces.Dict) and MASK_KEY in space.spaces


def without_mask(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return the part of an observation space that a policy looks at."""
    if not has_mask(space):
        return space
    assert isinstance(space, gymnasium.spaces.Dict)
    return gymnasium.spaces.Dict(
        {name: part for name, part in space.spaces.items() if name != MASK_KEY}
    )


def joined_flags(mask: Any) -> tf.Tensor:
    """Turn a mask, or a tuple with one per choice, into bool `[N, flags]`."""
    parts = [tf.cast(part, tf.bool) for part in tf.nest.flatten(mask)]
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)


def check_mask(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    choice_sizes: Sequence[int] | None,
) -> None:
    """Check that a mask, if there is one, has a flag for every action.

    Args:
        observation_space: perhaps a Dict with a mask.
        action_space: for the message.
        choice_sizes: number of options of each choice; None if nothing can be masked.

    Raises:
        UnsupportedSpaceError: the mask does not fit, or there is nothing besides it.
    """
    if not has_mask(observation_space):
        return
    where = f"observation[{MASK_KEY!r}]"
    assert isinstance(observation_space, gymnasium.spaces.Dict)
    mask = observation_space[MASK_KEY]
    if choice_sizes is None:
        raise UnsupportedSpaceError(
            f"{where}: expected a Discrete or MultiDiscrete action space, got "
            f"{action_space}; bits can be a MultiDiscrete of twos, and what is no mask "
            "needs another name."
        )
    if isinstance(mask, gymnasium.spaces.Tuple):
        parts, wanted = list(mask.spaces), list(choice_sizes)
    else:
        parts, wanted = [mask], [sum(choice_sizes)]
    got = [part.shape if isinstance(part, _FLAGS) else None for part in parts]
    if got != [(size,) for size in wanted]:
        shapes = ", ".join(f"[{size}]" for size in wanted)
        raise UnsupportedSpaceError(
            f"{where}: expected flags {shapes} (a MultiBinary, or a Box from 0 to 1) "
            f"for the actions {action_space}, got {mask}; declare one flag per action."
        )
    if len(observation_space.spaces) == 1:
        raise UnsupportedSpaceError(
            f"{where}: expected something to observe besides it; add a key to the Dict."
        )
