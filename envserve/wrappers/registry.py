"""The registered wrappers, with their constructors and arguments.

Gymnasium's wrappers have the names and arguments of their classes. Names are looked up
only in this registry, so a name from a client never imports anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from envserve.errors import WrapperError
from envserve.text import nearest_name


@dataclass(frozen=True)
class Argument:
    """The type and bounds of an argument, which limit the requests of clients.

    Attributes:
      kind: Type with bounds, for `msgspec.convert`.
      text: Description of valid values, for error messages.
      required: Whether the wrapper has no default for the argument.
    """

    kind: Any
    text: str
    required: bool

    def convert(self, value: Any) -> Any:
        """Convert a value to the argument's type.

        Raises:
          ValueError: The value is invalid.
        """
        return msgspec.convert(value, self.kind)


def Integer(low: int, high: int, *, required: bool = False) -> Argument:
    """Declare a wrapper argument that is an int in [low, high]."""
    kind = Annotated[int, Meta(ge=low, le=high)]
    return Argument(kind, f"an int from {low} to {high}", required)


def Number(low: float, high: float, *, required: bool = False) -> Argument:
    """Declare a wrapper argument that is an int or float in [low, high].

    The wrapper receives a float.
    """
    kind = Annotated[float, Meta(ge=low, le=high)]
    return Argument(kind, f"a number from {low:g} to {high:g}", required)


def Boolean(*, required: bool = False) -> Argument:
    """Declare a wrapper argument that is true or false."""
    return Argument(bool, "true or false", required)


def Choice(words: tuple[str, ...], *, required: bool = False) -> Argument:
    """Declare a wrapper argument that must be one of the given words."""
    return Argument(Literal[words], f"one of {', '.join(words)}", required)


def Integers(
    low: int, high: int, min_length: int, max_length: int, *, required: bool = False
) -> Argument:
    """Declare a wrapper argument that is a list of ints in [low, high].

    The wrapper receives a tuple.
    """
    item = Annotated[int, Meta(ge=low, le=high)]
    length = Meta(min_length=min_length, max_length=max_length)
    count = f"{min_length}" + (f" to {max_length}" if max_length > min_length else "")
    text = f"a list of {count} ints from {low} to {high}"
    return Argument(Annotated[tuple[item, ...], length], text, required)


def Keys(*, required: bool = False) -> Argument:
    """Declare a wrapper argument that lists keys of a Dict or positions in a Tuple.

    The wrapper receives a tuple.
    """
    item = Annotated[str, Meta(max_length=200)] | Annotated[int, Meta(ge=0, lt=1 << 16)]
    kind = Annotated[tuple[item, ...], Meta(min_length=1, max_length=256)]
    return Argument(kind, "a list of 1 to 256 names or positions from 0", required)


@dataclass(frozen=True)
class RegisteredWrapper:
    """A wrapper and its arguments.

    Attributes:
      make: Function that takes an env and keyword arguments, and returns the wrapped
        env. A string "module:attribute" is imported at first use.
      arguments: Maps the names of arguments that requests may contain to their types.
      is_limited: Whether the size of its observations is limited to a few MiB. False
        only for classes and functions that a user of this host passes.
    """

    make: str | Callable[..., Any]
    arguments: Mapping[str, Argument]
    is_limited: bool = True


_SCALE: Final = Number(-1e6, 1e6, required=True)
_REWARD: Final = Number(-1e9, 1e9)
_REPEATS: Final = Integer(1, 1000, required=True)
_EPSILON: Final = Number(1e-12, 1)
_BINS: Final = {"bins": Integer(2, 1000, required=True), "multidiscrete": Boolean()}

#: Maps class names of Gymnasium's wrappers to their arguments.
_GYMNASIUM: Final[dict[str, dict[str, Argument]]] = {
    "AddRenderObservation": {"render_only": Boolean()},
    "AtariPreprocessing": {
        "noop_max": Integer(0, 1000),
        "frame_skip": Integer(1, 100),
        "screen_size": Integer(1, 1024),
        "terminal_on_life_loss": Boolean(),
        "grayscale_obs": Boolean(),
        "grayscale_newaxis": Boolean(),
        "scale_obs": Boolean(),
    },
    "ClipAction": {},
    "ClipReward": {"min_reward": _REWARD, "max_reward": _REWARD},
    "DelayObservation": {"delay": Integer(0, 64, required=True)},
    "DiscretizeAction": _BINS,
    "DiscretizeObservation": _BINS,
    "DtypeObservation": {
        "dtype": Choice(("float32", "float64", "int32", "int64"), required=True)
    },
    "FilterObservation": {"filter_keys": Keys(required=True)},
    "FlattenObservation": {},
    "FrameStackObservation": {
        "stack_size": Integer(1, 64, required=True),
        "padding_type": Choice(("reset", "zero")),
    },
    "GrayscaleObservation": {"keep_dim": Boolean()},
    "MaxAndSkipObservation": {"skip": Integer(2, 100)},
    "NormalizeObservation": {"epsilon": _EPSILON},
    "NormalizeReward": {"gamma": Number(0, 1), "epsilon": _EPSILON},
    "RecordEpisodeStatistics": {"buffer_length": Integer(1, 10_000)},
    "RescaleAction": {"min_action": _SCALE, "max_action": _SCALE},
    "RescaleObservation": {"min_obs": _SCALE, "max_obs": _SCALE},
    "ReshapeObservation": {"shape": Integers(1, 1 << 22, 1, 8, required=True)},
    "ResizeObservation": {"shape": Integers(1, 1024, 2, 2, required=True)},
    "StickyAction": {
        "repeat_action_probability": Number(0, 0.999, required=True),
        "repeat_action_duration": Integer(1, 1000),
    },
    "TimeAwareObservation": {"flatten": Boolean(), "normalize_time": Boolean()},
    "TimeLimit": {"max_episode_steps": Integer(1, 10**9, required=True)},
}

#: Maps names of wrappers in `additional` to their arguments.
_ADDITIONAL: Final[dict[str, dict[str, Argument]]] = {
    "ActionRepeat": {"amount": _REPEATS},  # RepeatAction, by its older name
    "FrameDelta": {},
    "FrameHistory": {
        "past_indices": Integers(0, 63, 1, 64, required=True),
        "flatten": Boolean(),
    },
    "RandomStart": {"max_steps": Integer(1, 10_000, required=True)},
    "RangeNormalize": {"observation": Boolean(), "action": Boolean()},
    "RepeatAction": {"num_repeats": _REPEATS},
    "StaggerEpisodes": {},
}

#: Maps names to registered wrappers.
WRAPPERS: dict[str, RegisteredWrapper] = {
    name: RegisteredWrapper(f"{module}:{name}", arguments)
    for module, wrappers in (
        ("gymnasium.wrappers", _GYMNASIUM),
        ("envserve.wrappers.additional", _ADDITIONAL),
    )
    for name, arguments in wrappers.items()
}

#: Hints about batch-ppo's wrappers, which envserve does not need or names differently.
_BATCH_PPO: Final = {
    "AutoReset": "workers reset envs by themselves: see autoreset",
    "CacheSpaces": "not needed: spaces are read only once",
    "ConvertTo32Bit": "did you mean DtypeObservation, with dtype = float32?",
    "ExternalProcess": "not needed: envs run in worker processes",
    "LimitDuration": "did you mean TimeLimit, with max_episode_steps?",
}


def register_wrapper(
    name: str, make: Callable[..., Any], arguments: Mapping[str, Argument] | None = None
) -> None:
    """Register a wrapper in this process, for modules that register envs.

    Args:
      name: Name of the wrapper.
      make: Function that takes an env and keyword arguments, and returns the wrapped
        env.
      arguments: The arguments that requests may contain. Only their bounds limit the
        requests of a server's clients, so choose them such that the wrapper cannot use
        too much memory or CPU time.

    Raises:
      ValueError: Another wrapper has this name, or an argument is called `name`.
    """
    wrapper = RegisteredWrapper(make, dict(arguments or {}))
    if "name" in wrapper.arguments:
        raise ValueError(f"{name}: no argument can be called 'name'; rename it")
    if name in WRAPPERS and WRAPPERS[name] != wrapper:
        raise ValueError(f"wrapper {name!r} is already registered; choose another name")
    WRAPPERS[name] = wrapper


def find_wrapper(name: str, where: str) -> RegisteredWrapper:
    """Return a registered wrapper; `where` is its place in the request, for errors.

    Raises:
      WrapperError: No wrapper with this name is registered; the message suggests names.
    """
    if name in WRAPPERS:
        return WRAPPERS[name]
    nearest = nearest_name(name, sorted(WRAPPERS))
    hint = f"did you mean {nearest}?" if nearest else ""
    hint = _BATCH_PPO.get(name, hint) or (
        f"known: {', '.join(sorted(WRAPPERS))} (to add one, call register_wrapper in a "
        f"module that workers import: --import or import_modules)"
    )
    raise WrapperError(f"{where}: no wrapper named {name[:64]!r} is known; {hint}")
