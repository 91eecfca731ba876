"""The wrappers that are known: how each is made, and which arguments it takes.

A wrapper of Gymnasium's has the name and the arguments of its class. A name is looked
up here and nowhere else, so a name that comes over the wire imports nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from envserve.errors import WrapperError
from envserve.wrappers.arguments import (
    Argument,
    Boolean,
    Choice,
    Integer,
    Integers,
    Number,
)

__all__ = ["KNOWN", "Known", "find", "is_known", "register_wrapper"]


@dataclass(frozen=True)
class Known:
    """A wrapper that is known.

    Attributes:
      make: Takes an env and the arguments by name, and returns the wrapped env; as
        "module:attribute" if it is imported only when it is used.
      arguments: The arguments that may be given.
    """

    make: str | Callable[..., Any]
    arguments: Mapping[str, Argument]


_SCALE: Final = Number(-1e6, 1e6, required=True)
_REWARD: Final = Number(-1e9, 1e9)

KNOWN: dict[str, Known] = {
    # Gymnasium's.
    "AtariPreprocessing": Known(
        "gymnasium.wrappers:AtariPreprocessing",
        {
            "noop_max": Integer(0, 1000),
            "frame_skip": Integer(1, 100),
            "screen_size": Integer(1, 1024),
            "terminal_on_life_loss": Boolean(),
            "grayscale_obs": Boolean(),
            "grayscale_newaxis": Boolean(),
            "scale_obs": Boolean(),
        },
    ),
    "ClipAction": Known("gymnasium.wrappers:ClipAction", {}),
    "ClipReward": Known(
        "gymnasium.wrappers:ClipReward", {"min_reward": _REWARD, "max_reward": _REWARD}
    ),
    "DtypeObservation": Known(
        "gymnasium.wrappers:DtypeObservation",
        {"dtype": Choice(("float32", "float64", "int32", "int64"), required=True)},
    ),
    "FlattenObservation": Known("gymnasium.wrappers:FlattenObservation", {}),
    "FrameStackObservation": Known(
        "gymnasium.wrappers:FrameStackObservation",
        {
            "stack_size": Integer(1, 64, required=True),
            "padding_type": Choice(("reset", "zero")),
        },
    ),
    "GrayscaleObservation": Known(
        "gymnasium.wrappers:GrayscaleObservation", {"keep_dim": Boolean()}
    ),
    "MaxAndSkipObservation": Known(
        "gymnasium.wrappers:MaxAndSkipObservation", {"skip": Integer(2, 100)}
    ),
    "RescaleAction": Known(
        "gymnasium.wrappers:RescaleAction",
        {"min_action": _SCALE, "max_action": _SCALE},
    ),
    "RescaleObservation": Known(
        "gymnasium.wrappers:RescaleObservation", {"min_obs": _SCALE, "max_obs": _SCALE}
    ),
    "ResizeObservation": Known(
        "gymnasium.wrappers:ResizeObservation",
        {"shape": Integers(1, 1024, 2, 2, required=True)},
    ),
    "TimeAwareObservation": Known(
        "gymnasium.wrappers:TimeAwareObservation",
        {"flatten": Boolean(), "normalize_time": Boolean()},
    ),
    "TimeLimit": Known(
        "gymnasium.wrappers:TimeLimit",
        {"max_episode_steps": Integer(1, 10**9, required=True)},
    ),
    # Ours: Gymnasium has none that does the same.
    "ActionRepeat": Known(
        "envserve.wrappers.action_repeat:ActionRepeat",
        {"amount": Integer(1, 1000, required=True)},
    ),
    "FrameDelta": Known("envserve.wrappers.frame_delta:FrameDelta", {}),
    "FrameHistory": Known(
        "envserve.wrappers.frame_history:FrameHistory",
        {
            "past_indices": Integers(0, 63, 1, 64, required=True),
            "flatten": Boolean(),
        },
    ),
    "RandomStart": Known(
        "envserve.wrappers.random_start:RandomStart",
        {"max_steps": Integer(1, 10_000, required=True)},
    ),
    "RangeNormalize": Known(
        "envserve.wrappers.range_normalize:range_normalize",
        {"observation": Boolean(), "action": Boolean()},
    ),
}

#: What became of batch-ppo's wrappers that have another name here, or none.
_BATCH_PPO: Final = {
    "AutoReset": "workers reset envs by themselves: see autoreset",
    "CacheSpaces": "spaces are read once anyway",
    "ConvertTo32Bit": "did you mean DtypeObservation, with dtype = float32?",
    "ExternalProcess": "envs run in workers anyway",
    "LimitDuration": "did you mean TimeLimit, with max_episode_steps?",
}


def register_wrapper(
    name: str, make: Callable[..., Any], arguments: Mapping[str, Argument] | None = None
) -> None:
    """Makes a wrapper known in this process, for modules that register own envs.

    Args:
      name: What it is asked for by.
      make: Takes an env and the arguments by name, and returns the wrapped env.
      arguments: Which arguments may be given. Their bounds are all that holds the
        clients of a server, so choose them for what a wrapper may cost its host.

    Raises:
      ValueError: Another wrapper has that name, or an argument is called `name`.
    """
    known = Known(make, dict(arguments or {}))
    if "name" in known.arguments:
        raise ValueError(f"{name}: no argument can be called 'name'; rename it")
    if name in KNOWN and KNOWN[name] != known:
        raise ValueError(f"there is a wrapper {name!r} already; choose another name")
    KNOWN[name] = known


def is_known(name: str) -> bool:
    """Tells whether there is a wrapper of that name."""
    return name in KNOWN


def find(name: str, where: str) -> Known:
    """Returns a wrapper; raises WrapperError, with near matches, if there is none."""
    if name in KNOWN:
        return KNOWN[name]
    near = difflib.get_close_matches(name, sorted(KNOWN), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    hint = _BATCH_PPO.get(name, hint) or (
        f"known are {', '.join(sorted(KNOWN))} (own wrappers: see register_wrapper)"
    )
    raise WrapperError(f"{where}: no wrapper named {name[:64]!r} is known; {hint}")
