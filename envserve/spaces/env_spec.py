"""What envs look like: their spaces, as a plain description and as leaves.

A description goes to other processes and hosts, and may come from a peer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from envserve.errors import SpaceError
from envserve.spaces import codec
from envserve.spaces.leaves import (
    MAX_DEPTH,
    MAX_ROW_BYTES,
    NOTHING,
    Leaf,
    children_of,
    is_uniform,
    kind_of,
    leaves_of,
)

__all__ = ["EnvSpec", "describe", "restore", "spaces_equal"]

Array = np.ndarray[Any, Any]

#: Bytes of one value of a space; and what each space in it counts besides.
_MAX_VALUE_BYTES: Final = 1 << 30
_SPACE_BYTES: Final = 1 << 18
#: Bounds that differ take memory, several times over while a space is made of them.
_COPIES: Final = 16
_MAX_TEXT: Final = 500
#: What Gymnasium's spaces raise for wrong arguments, besides the usual.
_FROM_GYMNASIUM: Final = (AssertionError, MemoryError, OverflowError)


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
        """Leaves of the action space, in order; of an empty one, one of no bytes."""
        return leaves_of(self.action_space) or (NOTHING,)

    @cached_property
    def has_encoded_observations(self) -> bool:
        """Whether observations have to be decoded."""
        return any(leaf.is_encoded for leaf in self.observation_leaves)

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


def spaces_equal(left: Space[Any], right: Space[Any]) -> bool:
    """Tells whether two spaces have the same kind, bounds, shapes and dtypes."""
    return codec.encode(describe(left)) == codec.encode(describe(right))


def describe(space: Space[Any]) -> dict[str, Any]:
    """Returns a plain description of a space, for `codec.encode` and `restore`."""
    leaves_of(space)  # raises for every space that has no description
    return _describe(space)


def _describe(space: Any) -> dict[str, Any]:
    kind = kind_of(space)
    if kind == "dict":
        pairs = [[key, _describe(child)] for key, child in space.spaces.items()]
        return {"kind": kind, "spaces": pairs}
    if kind in _FIXED:
        dtype = codec.dtype_code(np.dtype(space.dtype))
        names = _FIXED[kind][0]
        return {
            **{"kind": kind, "dtype": dtype},
            **{name: _compact(getattr(space, name)) for name in names},
        }
    children = [_describe(child) for child in children_of(space, kind)]
    if kind == "tuple":
        return {"kind": kind, "spaces": children}
    (leaf,) = leaves_of(space)
    return {
        **{"kind": kind, "max_bytes": leaf.nbytes, "spaces": children},
        **{name: _compact(getattr(leaf.space, name)) for name in _ENCODED[kind][0]},
    }


def restore(description: Any) -> Space[Any]:
    """Builds the space that `describe` was given.

    Raises:
      SpaceError: The description, which may come from a peer, is not valid.
    """
    try:
        with np.errstate(over="raise", invalid="raise"):  # not a warning: an error
            space = _restore(description, MAX_DEPTH, _SpaceBudget())
        leaves_of(space)
    except SpaceError:
        raise
    except (
        *(LookupError, TypeError, ValueError, ArithmeticError),
        *_FROM_GYMNASIUM,
    ) as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        raise SpaceError(f"not a valid description of a space: {text}") from None
    return space


class _SpaceBudget:
    """The memory a description may claim: a few bytes of it can ask for gigabytes."""

    def __init__(self) -> None:
        self._left = [_MAX_VALUE_BYTES]  # shared with the budgets inside
        self._copies, self._longest, self.times = 1, _MAX_VALUE_BYTES, 1

    def nested(self, copies: int) -> _SpaceBudget:
        """Return the budget inside an encoded leaf that is stored `copies` times.

        No array in it is larger than the longest row; but there it is written out.
        """
        inner = copy.copy(self)
        inner._copies *= copies
        inner._longest, inner.times = MAX_ROW_BYTES, _COPIES
        return inner

    def charge(self, sizes: Iterable[Any], num_bytes: int, times: int = 1) -> None:
        """Charge `times` arrays of this shape; raise SpaceError above the budget."""
        shape = tuple(int(size) for size in sizes)
        total = math.prod(max(size, 1) for size in shape) * num_bytes
        self._left[0] -= total * times * self._copies
        if self._left[0] < 0 or total > self._longest:
            raise SpaceError(
                f"expected a space below {_MAX_VALUE_BYTES >> 20} MiB, and below "
                f"{MAX_ROW_BYTES >> 20} MiB in a Sequence, Graph or OneOf; "
                f"got a leaf of shape {str(shape)[:_MAX_TEXT]}"
            )


def _restore(
    description: dict[str, Any], depth: int, budget: _SpaceBudget
) -> Space[Any]:
    if depth == 0:
        raise SpaceError(f"expected a space nested at most {MAX_DEPTH} deep")
    budget.charge((), _SPACE_BYTES)
    kind = description["kind"]
    if kind == "dict":
        pairs = [
            (key, _restore(child, depth - 1, budget))
            for key, child in description["spaces"]
        ]
        # A list of pairs keeps the order; from a plain dict Gymnasium sorts the keys.
        return spaces.Dict(pairs)
    if kind in _FIXED:
        names, build = _FIXED[kind]
        dtype = codec.dtype_from_code(description["dtype"])
        return build(budget, dtype, *(description[name] for name in names))
    if kind != "tuple" and kind not in _ENCODED:
        shown = repr(kind[:_MAX_TEXT]) if isinstance(kind, str) else type(kind).__name__
        raise SpaceError(f"expected a kind of space that is known; got {shown}")
    if kind == "text":
        budget.charge([sum(map(len, description["character_list"]))], 1, 8 * _COPIES)
    if kind in _ENCODED:  # Gymnasium keeps a batched copy of what is in some
        budget = budget.nested(1 + (kind == "graph" or bool(description.get("stack"))))
    children = [_restore(child, depth - 1, budget) for child in description["spaces"]]
    if kind == "tuple":
        return spaces.Tuple(children)
    names, build = _ENCODED[kind]
    space = build(children, *(description[name] for name in names))
    vars(space)["max_bytes"] = description["max_bytes"]
    return space


def _compact(value: Any) -> Any:
    """Sends a scalar for an array of equal values: image bounds would be megabytes."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray) and value.size and is_uniform(value):
        return {"shape": list(value.shape), "fill": value.flat[0].item()}
    return value.item() if isinstance(value, np.generic) else value


def _expand(budget: _SpaceBudget, value: Any, dtype: np.dtype[Any]) -> Array:
    if isinstance(value, dict):
        budget.charge(value["shape"], dtype.itemsize, _COPIES)
        return np.full(tuple(value["shape"]), np.array(value["fill"], dtype), dtype)
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        got = getattr(value, "dtype", type(value).__name__)
        raise SpaceError(f"expected an array of {dtype}; got {got}")
    budget.charge(value.shape, dtype.itemsize, budget.times)
    return value


def _box(budget: _SpaceBudget, dtype: np.dtype[Any], low: Any, high: Any) -> Space[Any]:
    if not isinstance(low, dict) or not isinstance(high, dict):
        low, high = _expand(budget, low, dtype), _expand(budget, high, dtype)
        return spaces.Box(low, high, dtype=dtype.type)
    if low["shape"] != high["shape"]:
        raise SpaceError("expected a low and a high of the same shape")
    # One low and one high, seen from everywhere: bounds of a film take no memory.
    shape = tuple(low["shape"])
    budget.charge(shape, dtype.itemsize, budget.times)
    low, high = (np.array(bound["fill"], dtype).reshape(()) for bound in (low, high))
    box = spaces.Box(low, high, dtype=dtype.type)
    for name in ("low", "high", "bounded_below", "bounded_above"):
        vars(box)[name] = np.broadcast_to(vars(box)[name], shape)
    box._shape = shape
    return box


def _discrete(_: _SpaceBudget, dtype: np.dtype[Any], n: int, start: int) -> Space[Any]:
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _multi_binary(
    budget: _SpaceBudget, _: np.dtype[Any], shape: list[int]
) -> Space[Any]:
    budget.charge(shape, 1, budget.times)
    sizes = tuple(int(size) for size in shape)
    # Gymnasium holds MultiBinary(7) and MultiBinary((7,)) for different.
    return spaces.MultiBinary(sizes[0] if len(sizes) == 1 else sizes)


def _multi_discrete(
    budget: _SpaceBudget, dtype: np.dtype[Any], nvec: Any, start: Any
) -> Space[Any]:
    nvec, start = _expand(budget, nvec, dtype), _expand(budget, start, dtype)
    return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)


_Build = Callable[..., Space[Any]]
#: Spaces of arrays: attributes that define them, and how to build them from these.
_FIXED: Final[dict[str, tuple[tuple[str, ...], _Build]]] = {
    "box": (("low", "high"), _box),
    "discrete": (("n", "start"), _discrete),
    "multi_binary": (("shape",), _multi_binary),
    "multi_discrete": (("nvec", "start"), _multi_discrete),
}
#: The same of encoded ones, which are built from the spaces inside and these.
_ENCODED: Final[dict[str, tuple[tuple[str, ...], _Build]]] = {
    "text": (
        ("max_length", "min_length", "character_list"),
        lambda _, longest, least, characters: spaces.Text(
            longest, min_length=least, charset="".join(characters)
        ),
    ),
    "sequence": (
        ("stack",),
        lambda inner, stack: spaces.Sequence(inner[0], stack=bool(stack)),
    ),
    "graph": ((), lambda inner: spaces.Graph(*inner, *([None] * (2 - len(inner))))),
    "one_of": ((), spaces.OneOf),
}
