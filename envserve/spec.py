"""Spaces: between Gymnasium, a plain description, and a flat list of leaves.

Box, Discrete, MultiBinary and MultiDiscrete are leaves; Dict and Tuple of them are
flattened in their own order. Any other space is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from envserve import codec
from envserve.errors import SpaceError

__all__ = [
    "EnvSpec",
    "Leaf",
    "action_values",
    "describe",
    "flatten",
    "leaves_of",
    "restore",
    "spaces_equal",
    "unflatten",
]

Array = np.ndarray[Any, Any]

_MAX_DEPTH: Final = 8
_MAX_SPACE_BYTES: Final = 64 << 20
_MAX_TEXT: Final = 500
#: What Gymnasium's spaces raise for wrong arguments, besides the usual.
_FROM_GYMNASIUM: Final = (AssertionError, MemoryError, OverflowError)


@dataclass(frozen=True)
class Leaf:
    """One array of a flattened space.

    Attributes:
      path: Where it sits in the space, like "camera/left"; "" for the space itself.
      shape: Shape of one env's value, without the batch dimension.
      dtype: The space's own dtype, kept as it is.
      space: The leaf's Gymnasium space.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Space[Any]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one env's value."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Least and greatest values, inclusive, as the space says them."""
        space = self.space
        if isinstance(space, spaces.Box):
            return space.low, space.high
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            low = np.asarray(space.start)
            return low, low + (np.asarray(count) - 1)  # start + count may overflow
        return np.asarray(0), np.asarray(1)

    @cached_property
    def limits(self) -> tuple[Any, Any]:
        """The same, and finite: one number each if all elements share them."""
        low, high = self.bounds
        if self.dtype.kind == "f":
            limits = np.finfo(self.dtype)
            low, high = np.maximum(low, limits.min), np.minimum(high, limits.max)
        if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return low.flat[0].item(), high.flat[0].item()
        return np.broadcast_to(low, self.shape), np.broadcast_to(high, self.shape)

    def __str__(self) -> str:
        """Returns a form for messages, like `float32[3]`."""
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True)
class EnvSpec:
    """What a batch of equal envs looks like.

    Attributes:
      env_name: Registered name, like "HalfCheetah-v5".
      observation_space: Space of one env's observation.
      action_space: Space of one env's action.
    """

    env_name: str
    observation_space: Space[Any]
    action_space: Space[Any]

    @cached_property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the observation space, in order."""
        return leaves_of(self.observation_space)

    @cached_property
    def action_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the action space, in order."""
        return leaves_of(self.action_space)

    def differences(self, other: EnvSpec) -> list[str]:
        """Returns a line for each space in which the other spec differs."""
        pairs = (
            ("observation space", self.observation_space, other.observation_space),
            ("action space", self.action_space, other.action_space),
        )
        return [
            f"{name}: expected {ours}, got {theirs}"
            for name, ours, theirs in pairs
            if not spaces_equal(ours, theirs)
        ]


def leaves_of(space: Space[Any]) -> tuple[Leaf, ...]:
    """Returns the leaves of a space; raises SpaceError for a kind we cannot carry."""
    return tuple(_walk(space, "", _MAX_DEPTH))


def _walk(space: Space[Any], path: str, depth: int) -> Iterator[Leaf]:
    if depth == 0:
        raise SpaceError(f"expected a space nested at most {_MAX_DEPTH} deep; {path!r}")
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            if not isinstance(key, str):
                raise SpaceError(f"expected str keys in {space}; got {key!r}")
            yield from _walk(child, f"{path}/{key}" if path else key, depth - 1)
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _walk(
                child, f"{path}/{index}" if path else str(index), depth - 1
            )
    elif type(space) in _KINDS and space.shape is not None and space.dtype is not None:
        _check_dtype(space, path)
        yield Leaf(path, tuple(space.shape), np.dtype(space.dtype), space)
    else:
        where = f" at {path!r}" if path else ""
        raise SpaceError(
            f"expected a Box, Discrete, MultiBinary, MultiDiscrete, or a Dict or Tuple "
            f"of them; got {space}{where}; wrap the env to give one of these"
        )


def _check_dtype(space: Space[Any], path: str) -> None:
    try:
        codec.dtype_code(np.dtype(space.dtype))
    except codec.CodecError as error:
        raise SpaceError(f"space {space} at {path!r}: {error}") from None


def flatten(space: Space[Any], value: Any) -> list[Any]:
    """Returns the leaf values of one (possibly batched) value, in leaf order.

    Raises:
      SpaceError: The value's nesting is not that of the space.
    """
    if type(space) in _KINDS:
        return [value]
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            got = list(value) if isinstance(value, dict) else type(value).__name__
            raise SpaceError(f"expected a dict with {list(space.spaces)}; got {got}")
        return [
            leaf for key in space.spaces for leaf in flatten(space[key], value[key])
        ]
    if isinstance(space, spaces.Tuple):
        count = len(space.spaces)
        if not isinstance(value, (tuple, list)) or len(value) != count:
            raise SpaceError(
                f"expected a tuple of {count} values; got {type(value).__name__}"
                + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
            )
        return [
            leaf
            for child, item in zip(space.spaces, value, strict=True)
            for leaf in flatten(child, item)
        ]
    return [value]


def unflatten(space: Space[Any], leaves: Sequence[Any]) -> Any:
    """Nests leaf values as the space does: the inverse of `flatten`."""
    if type(space) in _KINDS:
        return leaves[0]
    return _nest(space, iter(leaves))


def _nest(space: Space[Any], leaves: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(child, leaves) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, leaves) for child in space.spaces)
    return next(leaves)


def spaces_equal(left: Space[Any], right: Space[Any]) -> bool:
    """Tells whether two spaces have the same kind, bounds, shapes and dtypes."""
    return codec.encode(describe(left)) == codec.encode(describe(right))


def describe(space: Space[Any]) -> dict[str, Any]:
    """Returns a plain description of a space, for `codec.encode` and `restore`."""
    leaves_of(space)  # raises for every space that has no description
    return _describe(space)


def _describe(space: Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        children = [[key, _describe(child)] for key, child in space.spaces.items()]
        return {"kind": "dict", "spaces": children}
    if isinstance(space, spaces.Tuple):
        return {"kind": "tuple", "spaces": [_describe(child) for child in space.spaces]}
    kind, attributes, _ = _KINDS[type(space)]
    description = {"kind": kind, "dtype": codec.dtype_code(np.dtype(space.dtype))}
    for name in attributes:
        description[name] = _compact(getattr(space, name))
    return description


def restore(description: Any) -> Space[Any]:
    """Builds the space that `describe` was given.

    Raises:
      SpaceError: The description, which may come from a peer, is not valid.
    """
    try:
        with np.errstate(over="raise", invalid="raise"):  # not a warning: an error
            return _restore(description, _MAX_DEPTH, _Room())
    except SpaceError:
        raise
    except (
        *(LookupError, TypeError, ValueError, ArithmeticError),
        *_FROM_GYMNASIUM,
    ) as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        raise SpaceError(f"not a valid description of a space: {text}") from None


class _Room:
    """Bytes that a description may claim: a few of its own can ask for gigabytes."""

    def __init__(self) -> None:
        self._left = _MAX_SPACE_BYTES

    def take(self, sizes: Iterable[Any], dtype: np.dtype[Any]) -> None:
        shape = tuple(int(size) for size in sizes)
        self._left -= math.prod(max(size, 1) for size in shape) * dtype.itemsize
        if self._left < 0:
            raise SpaceError(
                f"expected a space below {_MAX_SPACE_BYTES >> 20} MiB; "
                f"got a leaf of shape {str(shape)[:_MAX_TEXT]}"
            )


def _restore(description: dict[str, Any], depth: int, room: _Room) -> Space[Any]:
    if depth == 0:
        raise SpaceError(f"expected a space nested at most {_MAX_DEPTH} deep")
    kind = description["kind"]
    if kind == "dict":
        pairs = [
            (str(key), _restore(child, depth - 1, room))
            for key, child in description["spaces"]
        ]
        # A list of pairs keeps the order; from a plain dict Gymnasium sorts the keys.
        return spaces.Dict(pairs)
    if kind == "tuple":
        return spaces.Tuple(
            [_restore(child, depth - 1, room) for child in description["spaces"]]
        )
    for known, attributes, build in _KINDS.values():
        if kind == known:
            dtype = codec.dtype_from_code(description["dtype"])
            values = [description[name] for name in attributes]
            for value in values:
                if isinstance(value, (dict, list)):
                    sizes = value["shape"] if isinstance(value, dict) else value
                    room.take(sizes, dtype)
            return build(dtype, *values)
    shown = repr(kind[:_MAX_TEXT]) if isinstance(kind, str) else type(kind).__name__
    raise SpaceError(f"expected a kind of space that is known; got {shown}")


def _compact(value: Any) -> Any:
    """Sends a scalar for an array of equal values: image bounds would be megabytes."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
        return {"shape": list(value.shape), "fill": value.flat[0].item()}
    return value.item() if isinstance(value, np.generic) else value


def _expand(value: Any, dtype: np.dtype[Any]) -> Array:
    if isinstance(value, dict):
        return np.full(tuple(value["shape"]), np.array(value["fill"], dtype), dtype)
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        got = getattr(value, "dtype", type(value).__name__)
        raise SpaceError(f"expected an array of {dtype}; got {got}")
    return value


def _box(dtype: np.dtype[Any], low: Any, high: Any) -> Space[Any]:
    return spaces.Box(_expand(low, dtype), _expand(high, dtype), dtype=dtype.type)


def _discrete(dtype: np.dtype[Any], n: int, start: int) -> Space[Any]:
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _multi_binary(_: np.dtype[Any], shape: list[int]) -> Space[Any]:
    sizes = tuple(int(size) for size in shape)
    # Gymnasium holds MultiBinary(7) and MultiBinary((7,)) for different.
    return spaces.MultiBinary(sizes[0] if len(sizes) == 1 else sizes)


def _multi_discrete(dtype: np.dtype[Any], nvec: Any, start: Any) -> Space[Any]:
    return spaces.MultiDiscrete(
        _expand(nvec, dtype), dtype=dtype.type, start=_expand(start, dtype)
    )


#: Leaf spaces: kind, attributes that define it, and how to build it from them.
_KINDS: dict[type, tuple[str, tuple[str, ...], Callable[..., Space[Any]]]] = {
    spaces.Box: ("box", ("low", "high"), _box),
    spaces.Discrete: ("discrete", ("n", "start"), _discrete),
    spaces.MultiBinary: ("multi_binary", ("shape",), _multi_binary),
    spaces.MultiDiscrete: ("multi_discrete", ("nvec", "start"), _multi_discrete),
}


def action_values(spec: EnvSpec, arrays: Sequence[Array]) -> list[Any]:
    """Returns actions as envs expect them, from one array `[n, ...]` per leaf."""
    per_leaf = []
    for leaf, array in zip(spec.action_leaves, arrays, strict=True):
        values = list(array)
        if not leaf.shape and isinstance(leaf.space, spaces.Box):
            values = [np.asarray(value) for value in values]
        per_leaf.append(values)
    space = spec.action_space
    if spec.action_leaves[0].space is space:
        return per_leaf[0]
    return [unflatten(space, values) for values in zip(*per_leaf, strict=True)]
