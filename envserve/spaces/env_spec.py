"""The spaces of an env, and their descriptions for other processes and hosts.

A description is a plain value that may come from an untrusted peer, so `restore` checks
it and limits the memory that it can claim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from envserve.errors import SpaceError
from envserve.spaces import codec
from envserve.spaces.leaves import (
    EMPTY_LEAF,
    MAX_DEPTH,
    MAX_ROW_BYTES,
    Array,
    Leaf,
    children_of,
    is_uniform,
    kind_of,
    leaves_of,
)

#: Maximum size in bytes of one value of a described space.
_MAX_VALUE_BYTES: Final = 1 << 30
#: Bytes charged to the budget for each space in a description, in addition to arrays.
_SPACE_BYTES: Final = 1 << 18
#: Maximum size in bytes of uniform bounds that are copied; `_SPACE_BYTES` covers them.
_MAX_COPY_BYTES: Final = 1 << 16
#: Number of copies of non-uniform bounds that Gymnasium holds while it builds a space.
_BOUNDS_COPIES: Final = 16
_MAX_TEXT_LENGTH: Final = 500


@dataclass(frozen=True)
class EnvSpec:
    """The name and spaces of an env; all envs of a batch share them.

    Attributes:
      env_name: Registered name, such as "HalfCheetah-v5".
      observation_space: Observation space of one env.
      action_space: Action space of one env.
    """

    env_name: str
    observation_space: Space[Any]
    action_space: Space[Any]

    @cached_property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the observation space, in the order of its items."""
        return _leaves_of("observation", self.observation_space)

    @cached_property
    def action_leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the action space, in the order of its items; never empty.

        If the space has no leaves, `EMPTY_LEAF` takes their place.
        """
        return _leaves_of("action", self.action_space) or (EMPTY_LEAF,)

    @cached_property
    def single_observation(self) -> Leaf | None:
        """The leaf if an observation is one array of fixed shape; otherwise None."""
        return _single_leaf(self.observation_space, self.observation_leaves)

    @cached_property
    def single_action(self) -> Leaf | None:
        """The leaf if an action is one array of fixed shape; otherwise None."""
        return _single_leaf(self.action_space, self.action_leaves)

    @cached_property
    def has_encoded_observations(self) -> bool:
        """Whether any observation leaves are encoded."""
        return any(leaf.is_encoded for leaf in self.observation_leaves)

    def differences(self, other: EnvSpec, observation_mode: str = "same") -> list[str]:
        """Return one line for each space that differs between this spec and another.

        For the mode, see `settings.ObservationMode`.
        """
        ours, theirs = self.observation_space, other.observation_space
        lines = []
        is_same_layout = _layout(ours) == _layout(theirs)
        if not (
            observation_mode == "different" and is_same_layout
        ) and not spaces_equal(ours, theirs):
            # Gymnasium's tests require this text.
            hint = (
                "; the sub-environments observation spaces are not equivalent. If this "
                "is intentional, use `observation_mode='different'` instead."
            )
            hint = hint if is_same_layout else ""
            lines.append(f"observation space: expected {ours}, got {theirs}{hint}")
        ours, theirs = self.action_space, other.action_space
        if not spaces_equal(ours, theirs):
            lines.append(f"action space: expected {ours}, got {theirs}")
        return lines


def _leaves_of(name: str, space: Space[Any]) -> tuple[Leaf, ...]:
    try:
        return leaves_of(space)
    except SpaceError as error:
        raise SpaceError(f"{name} space: {error}") from None


def _single_leaf(space: Space[Any], leaves: Sequence[Leaf]) -> Leaf | None:
    is_single = len(leaves) == 1 and leaves[0].space is space
    return leaves[0] if is_single and not leaves[0].is_encoded else None


def _layout(space: Space[Any]) -> list[Any]:
    return [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves_of(space)]


def spaces_equal(left: Space[Any], right: Space[Any]) -> bool:
    """Return whether two spaces have the same kinds, bounds, shapes and dtypes."""
    both = (describe(space, has_optional=False) for space in (left, right))
    return len({codec.encode(description) for description in both}) == 1


def describe(space: Space[Any], *, has_optional: bool = True) -> dict[str, Any]:
    """Return a plain description of a space, for `codec.encode` and `restore`.

    Args:
      space: The space.
      has_optional: Whether to include fields that servers of older releases omit.

    Raises:
      SpaceError: The space is not supported.
    """
    leaves_of(space)  # raises SpaceError for unsupported spaces
    return _describe(space, has_optional)


def _describe(space: Any, has_optional: bool) -> dict[str, Any]:
    kind = kind_of(space)
    if kind == "dict":
        items = space.spaces.items()
        pairs = [[key, _describe(child, has_optional)] for key, child in items]
        return {"kind": kind, "spaces": pairs}
    if kind in _FIXED_SHAPE_SPACES:
        dtype = codec.dtype_code(np.dtype(space.dtype))
        names = _FIXED_SHAPE_SPACES[kind][0]
        description = {
            "kind": kind,
            "dtype": dtype,
            **{name: _compact(getattr(space, name)) for name in names},
        }
        if kind == "multi_binary" and has_optional:
            description["n"] = _compact(space.n)
        if kind == "box" and has_optional and space.dtype.kind == "i":
            # An infinite bound of integers is stored as the limit of the dtype.
            for name in _OPTIONAL_FIELDS[kind]:
                flag = np.asarray(getattr(space, name))  # may be an np.bool_
                description |= {} if flag.all() else {name: _compact(flag)}
        return description
    children = [_describe(child, has_optional) for child in children_of(space, kind)]
    if kind == "tuple":
        return {"kind": kind, "spaces": children}
    (leaf,) = leaves_of(space)
    names = _ENCODED_SPACES[kind][0]
    return {
        "kind": kind,
        "max_bytes": leaf.nbytes,
        "spaces": children,
        **{name: _compact(getattr(leaf.space, name)) for name in names},
    }


def restore(description: Any) -> Space[Any]:
    """Build a space from its description.

    Raises:
      SpaceError: The description is not valid.
    """
    try:
        # Make casts of hostile bounds raise FloatingPointError instead of warning.
        with np.errstate(over="raise", invalid="raise"):
            space = _restore(description, MAX_DEPTH, _SpaceBudget())
        leaves_of(space)
    except SpaceError:
        raise
    except (
        *(ArithmeticError, LookupError, TypeError, ValueError),
        *(AssertionError, MemoryError),  # from Gymnasium's spaces
    ) as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT_LENGTH]
        raise SpaceError(f"not a valid space description: {text}") from None
    return space


class _SpaceBudget:
    """Memory budget for building a space from a description.

    Without a budget, a few bytes of a description could request gigabytes.
    """

    def __init__(self) -> None:
        self._left = [_MAX_VALUE_BYTES]  # a list, so that nested budgets share it
        self._copies = self.num_bounds_copies = 1
        self._max_array_bytes = _MAX_VALUE_BYTES

    def nested(self, copies: int) -> _SpaceBudget:
        """Return the budget for the spaces inside an encoded leaf.

        These spaces are stored `copies` times. Their arrays must not exceed the maximum
        row size. Gymnasium copies their bounds, and the copies are charged, too.
        """
        inner = copy.copy(self)
        inner._copies *= copies
        inner._max_array_bytes = MAX_ROW_BYTES
        inner.num_bounds_copies = _BOUNDS_COPIES
        return inner

    def charge(self, sizes: Iterable[Any], num_bytes: int, times: int = 1) -> None:
        """Charge the memory of `times` arrays to the budget.

        Each array has the shape `sizes`, and elements of `num_bytes` bytes.

        Raises:
          SpaceError: The arrays exceed the budget.
        """
        shape = tuple(int(size) for size in sizes)
        total = math.prod(max(size, 1) for size in shape) * num_bytes
        self._left[0] -= total * times * self._copies
        if self._left[0] < 0 or total > self._max_array_bytes:
            raise SpaceError(
                f"expected a space of at most {_MAX_VALUE_BYTES >> 20} MiB, or at most "
                f"{MAX_ROW_BYTES >> 20} MiB inside a Sequence, Graph or OneOf; "
                f"got a leaf of shape {str(shape)[:_MAX_TEXT_LENGTH]}"
            )


def _restore(
    description: dict[str, Any], depth: int, budget: _SpaceBudget
) -> Space[Any]:
    if depth == 0:
        raise SpaceError(f"expected a space nested at most {MAX_DEPTH} levels deep")
    budget.charge((), _SPACE_BYTES)
    kind = description["kind"]
    if kind == "dict":
        pairs = [
            (key, _restore(child, depth - 1, budget))
            for key, child in description["spaces"]
        ]
        # A list of pairs keeps the order; Gymnasium sorts the keys of a plain dict.
        return spaces.Dict(pairs)
    if kind in _FIXED_SHAPE_SPACES:
        names, build = _FIXED_SHAPE_SPACES[kind]
        dtype = codec.dtype_from_code(description["dtype"])
        optional = {
            name: description.get(name) for name in _OPTIONAL_FIELDS.get(kind, ())
        }
        return build(budget, dtype, *(description[name] for name in names), **optional)
    if kind != "tuple" and kind not in _ENCODED_SPACES:
        kind_text = (
            repr(kind[:_MAX_TEXT_LENGTH])
            if isinstance(kind, str)
            else type(kind).__name__
        )
        raise SpaceError(f"expected a known kind of space; got {kind_text}")
    if kind == "text":
        budget.charge(
            [sum(map(len, description["character_list"]))], 1, 8 * _BOUNDS_COPIES
        )
    if kind in _ENCODED_SPACES:
        # Graphs and stacked Sequences keep a batched copy of their inner space.
        budget = budget.nested(1 + (kind == "graph" or bool(description.get("stack"))))
    children = [_restore(child, depth - 1, budget) for child in description["spaces"]]
    if kind == "tuple":
        return spaces.Tuple(children)
    names, build = _ENCODED_SPACES[kind]
    space = build(children, *(description[name] for name in names))
    vars(space)["max_bytes"] = description["max_bytes"]
    return space


def _compact(value: Any) -> Any:
    """Convert a space's attribute to a plain value.

    An array of equal values becomes its shape and one value, because the bounds of an
    image would take megabytes.
    """
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray) and value.size and is_uniform(value):
        return {"shape": list(value.shape), "fill": value.flat[0].item()}
    return value.item() if isinstance(value, np.generic) else value


def _expand(budget: _SpaceBudget, value: Any, dtype: np.dtype[Any]) -> Array:
    if isinstance(value, dict):
        budget.charge(value["shape"], dtype.itemsize, _BOUNDS_COPIES)
        return np.full(tuple(value["shape"]), np.array(value["fill"], dtype), dtype)
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        actual = getattr(value, "dtype", type(value).__name__)
        raise SpaceError(f"expected an array of {dtype}; got {actual}")
    budget.charge(value.shape, dtype.itemsize, budget.num_bounds_copies)
    return value


def _box(
    budget: _SpaceBudget, dtype: np.dtype[Any], low: Any, high: Any, **flags: Any
) -> Space[Any]:
    box = _box_of_bounds(budget, dtype, low, high)
    for name, value in flags.items():
        if value is not None:
            flag = _expand(budget, value, np.dtype(np.bool_))
            if flag.shape != box.shape:
                raise SpaceError(f"expected low and {name} to have the same shape")
            vars(box)[name] = vars(box)[name] & flag
    return box


def _box_of_bounds(
    budget: _SpaceBudget, dtype: np.dtype[Any], low: Any, high: Any
) -> spaces.Box[Any]:
    if not isinstance(low, dict) or not isinstance(high, dict):
        low, high = _expand(budget, low, dtype), _expand(budget, high, dtype)
        return spaces.Box(low, high, dtype=dtype.type)
    if low["shape"] != high["shape"]:
        raise SpaceError("expected low and high to have the same shape")
    # Broadcast uniform bounds, so that the bounds of a large image take no memory.
    shape = tuple(low["shape"])
    budget.charge(shape, dtype.itemsize, budget.num_bounds_copies)
    low, high = (np.array(bound["fill"], dtype).reshape(()) for bound in (low, high))
    box = spaces.Box(low, high, dtype=dtype.type)
    for name in ("low", "high", "bounded_below", "bounded_above"):
        bound = np.broadcast_to(vars(box)[name], shape)
        # In a view, users could not change the bounds, and PyTorch would warn about it.
        vars(box)[name] = bound if bound.nbytes > _MAX_COPY_BYTES else bound.copy()
    box._shape = shape
    return box


def _discrete(_: _SpaceBudget, dtype: np.dtype[Any], n: int, start: int) -> Space[Any]:
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _multi_binary(
    budget: _SpaceBudget, _: np.dtype[Any], shape: list[int], n: Any
) -> Space[Any]:
    budget.charge(shape, 1, budget.num_bounds_copies)
    sizes = tuple(int(size) for size in shape)
    # Gymnasium treats MultiBinary(7) and MultiBinary((7,)) as different spaces.
    is_number = len(sizes) == 1 and not isinstance(n, list)
    return spaces.MultiBinary(sizes[0] if is_number else sizes)


def _multi_discrete(
    budget: _SpaceBudget, dtype: np.dtype[Any], nvec: Any, start: Any
) -> Space[Any]:
    nvec, start = _expand(budget, nvec, dtype), _expand(budget, start, dtype)
    return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)


_Build = Callable[..., Space[Any]]
#: For each kind of space whose values are arrays: the attributes that define a space,
#: and a builder that takes the budget, the dtype and these attributes.
_FIXED_SHAPE_SPACES: Final[dict[str, tuple[tuple[str, ...], _Build]]] = {
    "box": (("low", "high"), _box),
    "discrete": (("n", "start"), _discrete),
    "multi_binary": (("shape",), _multi_binary),
    "multi_discrete": (("nvec", "start"), _multi_discrete),
}
#: Attributes that a description may omit, by the kind of the space.
_OPTIONAL_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "box": ("bounded_below", "bounded_above"),
    "multi_binary": ("n",),
}
#: For each kind of space whose values are encoded: the attributes that define a space,
#: and a builder that takes the inner spaces and these attributes.
_ENCODED_SPACES: Final[dict[str, tuple[tuple[str, ...], _Build]]] = {
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
