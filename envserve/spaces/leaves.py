"""Flatten a space into leaves, each of which is one array in every batch.

Box, Discrete, MultiBinary and MultiDiscrete are leaves. So are Text, Sequence, Graph
and OneOf, whose values `variable_length` encodes as rows of bytes. Dict and Tuple are
flattened in their own order. A subclass counts as its base; any other Space is an
error.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space
from gymnasium.vector.utils import create_empty_array

from envserve.errors import SpaceError
from envserve.spaces import codec

__all__ = [
    "FIXED",
    "MAX_DEPTH",
    "MAX_ROW_BYTES",
    "NOTHING",
    "Leaf",
    "children_of",
    "custom_space_classes",
    "flatten",
    "is_uniform",
    "kind_of",
    "leaves_of",
    "unflatten",
]

Array = np.ndarray[Any, Any]

MAX_DEPTH: Final = 8
#: Bytes of an encoded row: of one without a longest value, and of any at most.
_ROW_BYTES: Final = 4096
MAX_ROW_BYTES: Final = 1 << 20
#: Items of a sequence or nodes of a graph, and edges, for which there is room.
_NUM_ITEMS: Final = (32, 128)
#: What the encoding takes besides the numbers, at most: of a row, of an array in it.
_HEAD_BYTES: Final = 32
#: An own space of texts, like MiniGrid's missions, is taken as this.
_ANY_TEXT: Final = spaces.Text(
    1024, min_length=0, charset="".join(filter(str.isprintable, string.printable))
)
FIXED: Final = frozenset(["box", "discrete", "multi_binary", "multi_discrete"])
_CLASSES: Final[dict[type[Space[Any]], str]] = {
    spaces.Box: "box",
    spaces.Discrete: "discrete",
    spaces.MultiBinary: "multi_binary",
    spaces.MultiDiscrete: "multi_discrete",
    spaces.Text: "text",
    spaces.Sequence: "sequence",
    spaces.Graph: "graph",
    spaces.OneOf: "one_of",
    spaces.Dict: "dict",
    spaces.Tuple: "tuple",
}


@dataclass(frozen=True)
class Leaf:
    """One array of a flattened space.

    Attributes:
      path: Where it sits in the space, like "camera/left"; "" for the space itself.
      shape: Shape of one env's value, without the batch dimension.
      dtype: The space's own dtype, kept as it is.
      space: The leaf's Gymnasium space.
      is_encoded: Whether its values are rows of bytes, uint8 `[bytes]`; see
        `variable_length`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Space[Any]
    is_encoded: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one env's value."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def empty(self) -> tuple[Any, int]:
        """Value of an encoded row that nobody has written; and how many arrays."""
        (value,) = create_empty_array(self.space, 1)  # type: ignore[misc]
        return value, 1 + codec.check(codec.encode(value), 1 << 30) // 16

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Least and greatest values, inclusive, as the space says them."""
        space = self.space
        if self.is_encoded:  # any byte
            return np.asarray(0), np.asarray(255)
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
        is_one = low.size and is_uniform(low) and is_uniform(high)
        if is_one:
            low, high = low.flat[0], high.flat[0]
        if self.dtype.kind == "f":
            limits = np.finfo(self.dtype)
            low, high = np.maximum(low, limits.min), np.minimum(high, limits.max)
        if is_one:
            return low.item(), high.item()
        return np.broadcast_to(low, self.shape), np.broadcast_to(high, self.shape)

    def __str__(self) -> str:
        """Returns a form for messages, like `float32[3]`."""
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


#: Actions without any content: they are counted, and take no bytes.
NOTHING: Final = Leaf("", (0,), np.dtype(np.uint8), spaces.Box(0, 1, (0,), np.uint8))


def leaves_of(space: Space[Any]) -> tuple[Leaf, ...]:
    """Returns the leaves of a space; raises SpaceError for a kind we cannot carry."""
    return tuple(_walk(space, "", MAX_DEPTH))


def custom_space_classes(space: Space[Any]) -> dict[str, str]:
    """Returns what kinds the classes of users in a space are taken as, by name."""
    kind, found = kind_of(space), {}
    if not type(space).__module__.startswith("gymnasium.spaces"):
        found[type(space).__qualname__] = kind
    for child in children_of(space, kind):
        found |= custom_space_classes(child)
    return found


def kind_of(space: Space[Any]) -> str:
    """Returns the kind that a space is of; "" if it is none that we know."""
    for known, kind in _CLASSES.items():
        if isinstance(space, known):
            return kind
    is_text = space.dtype is not None and np.dtype(space.dtype).kind == "U"
    return "text" if is_text else ""


def children_of(space: Any, kind: str) -> list[Space[Any]]:
    """Returns the spaces that one is made of."""
    if kind == "graph":
        both = (space.node_space, space.edge_space)
        return [child for child in both if child is not None]
    if kind == "sequence":
        return [space.feature_space]
    inner: Any = getattr(space, "spaces", ())
    return list(inner.values() if kind == "dict" else inner)


def _walk(space: Any, path: str, depth: int) -> Iterator[Leaf]:
    if depth == 0:
        raise SpaceError(
            f"expected a space nested at most {MAX_DEPTH} deep; got more at {path!r}; "
            f"flatten some of it in the env"
        )
    kind = kind_of(space)
    children = children_of(space, kind)
    if kind in ("dict", "tuple"):
        keys = space.spaces if kind == "dict" else range(len(children))
        for key, child in zip(keys, children, strict=True):
            if type(key) not in (str, int):
                raise SpaceError(f"expected str or int as keys in {space}; got {key!r}")
            yield from _walk(child, f"{path}/{key}" if path else str(key), depth - 1)
    elif kind in FIXED and space.shape is not None and space.dtype is not None:
        _check_dtype(space, path)
        yield Leaf(path, tuple(space.shape), np.dtype(space.dtype), space)
    elif kind and kind not in FIXED:
        own_bytes = getattr(space, "max_bytes", None)
        if kind == "text" and not isinstance(space, spaces.Text):
            space = _ANY_TEXT
        parts = [list(_walk(child, "", depth - 1)) for child in children]
        size = _row_bytes(space, kind, parts) if own_bytes is None else own_bytes
        if type(size) is not int or not _HEAD_BYTES <= size <= MAX_ROW_BYTES:
            raise SpaceError(
                f"max_bytes of {space}{_at(path)}: expected {_HEAD_BYTES} to "
                f"{MAX_ROW_BYTES}; got {size!r:.99}"
            )
        if kind == "text" and (not space.characters or space.min_length > size):
            raise SpaceError(
                f"expected a Text with characters, so short that one fits into {size} "
                f"bytes{_at(path)}; got {space!s:.200}"
            )
        yield Leaf(path, (size,), np.dtype(np.uint8), space, is_encoded=True)
    else:
        raise SpaceError(
            f"expected a Box, Discrete, MultiBinary, MultiDiscrete, Text, Sequence, "
            f"Graph, OneOf, or a Dict or Tuple of them; got {space}, a "
            f"{type(space).__qualname__}{_at(path)}; derive that class from one of "
            f"these, or wrap the env to give one"
        )


def _row_bytes(space: Any, kind: str, parts: Iterable[Iterable[Leaf]]) -> int:
    """Returns how long the rows of an encoded leaf are.

    That is what its longest value takes, if there is one; else what some items take,
    and at least 4 KiB.
    """
    sizes = [
        sum(_HEAD_BYTES + len(x.path) + 8 * len(x.shape) + x.nbytes for x in part)
        for part in parts
    ]
    size: int
    if kind == "text":
        size = space.max_length * max(len(c.encode()) for c in space.characters or "?")
    elif kind == "one_of":
        size = max(sizes)
    else:
        needed = (n * size for n, size in zip(_NUM_ITEMS, sizes, strict=False))
        size = max(sum(needed), _ROW_BYTES - _HEAD_BYTES)
    return min(_HEAD_BYTES + size, MAX_ROW_BYTES)


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def _check_dtype(space: Space[Any], path: str) -> None:
    try:
        codec.dtype_code(np.dtype(space.dtype))
    except codec.CodecError as error:
        raise SpaceError(f"space {space}{_at(path)}: {error}") from None


def flatten(space: Space[Any], value: Any) -> list[Any]:
    """Returns the leaf values of one (possibly batched) value, in leaf order.

    Raises:
      SpaceError: The value's nesting is not that of the space.
    """
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


def unflatten(space: Space[Any], leaves: Iterable[Any]) -> Any:
    """Nests leaf values as the space does: the inverse of `flatten`."""
    return _nest(space, iter(leaves))


def _nest(space: Space[Any], leaves: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(child, leaves) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, leaves) for child in space.spaces)
    return next(leaves)


def is_uniform(value: Array) -> bool:
    """Tells whether all numbers of an array are equal; it has at least one."""
    return not any(value.strides) or bool((value == value.flat[0]).all())
