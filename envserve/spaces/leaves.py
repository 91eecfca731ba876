"""Flatten a space into leaves, each of which becomes one array in a batch.

Box, Discrete, MultiBinary and MultiDiscrete are leaves. So are Text, Sequence, Graph
and OneOf, whose values `variable_length` encodes as rows of bytes. Dict and Tuple are
flattened in the order of their items. An instance of a subclass is treated like an
instance of its base class; any other Space raises SpaceError.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space
from gymnasium.vector.utils import create_empty_array

from envserve.errors import SpaceError
from envserve.spaces import codec

#: An array of any dtype and shape.
Array = np.ndarray[Any, Any]

#: Maximum nesting depth of a space.
MAX_DEPTH: Final = 8
#: Minimum row size in bytes of an encoded leaf whose values have no maximum length.
_DEFAULT_ROW_BYTES: Final = 4096
#: Maximum row size in bytes of an encoded leaf.
MAX_ROW_BYTES: Final = 1 << 20
#: Numbers of nodes and of edges of a Graph that always fit into a row. The first is
#: also the number of items of a Sequence.
_NUM_ITEMS: Final = (32, 128)
#: Upper bound for the bytes that the encoding adds to a row, and to each array in it.
_HEADER_BYTES: Final = 32
#: Space that replaces a text space whose class does not derive from Text, such as
#: MiniGrid's MissionSpace.
_ANY_TEXT: Final = spaces.Text(
    1024, min_length=0, charset="".join(filter(str.isprintable, string.printable))
)
#: Kinds of spaces whose values are arrays of fixed shape and dtype.
FIXED_SHAPE_KINDS: Final = frozenset(
    ["box", "discrete", "multi_binary", "multi_discrete"]
)
_KINDS: Final[dict[type[Space[Any]], str]] = {
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
      path: Path of keys to the leaf, such as "camera/left"; "" for the space itself.
      shape: Shape of one env's value, without the batch dimension.
      dtype: Dtype of the space in native byte order; uint8 if the leaf is encoded.
      space: Gymnasium space of the leaf.
      is_encoded: Whether values are stored as rows of bytes, uint8 `[bytes]`; see
        `variable_length`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Space[Any]
    is_encoded: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Size of one env's value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def empty_value(self) -> Any:
        """Value that an encoded row has until it is written."""
        (value,) = create_empty_array(self.space, 1)  # type: ignore[misc]
        return value

    @cached_property
    def empty_cost(self) -> int:
        """Number of values to charge for a copy of `empty_value`."""
        # A copy costs less than a decoded value, because copying is faster.
        return 1 + codec.check(codec.encode(self.empty_value), 1 << 30) // 16

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values, inclusive, as the space defines them."""
        space = self.space
        if self.is_encoded:
            return np.asarray(0), np.asarray(255)
        if isinstance(space, spaces.Box):
            return space.low, space.high
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            low = np.asarray(space.start)
            return low, low + (np.asarray(count) - 1)  # `low + count` may overflow
        return np.asarray(0), np.asarray(1)

    @cached_property
    def limits(self) -> tuple[Any, Any]:
        """Lowest and highest finite values within `bounds`, inclusive.

        The limits are numbers if all elements have the same bounds; otherwise, they are
        arrays of the leaf's shape.
        """
        low, high = self.bounds
        is_single = low.size and is_uniform(low) and is_uniform(high)
        if is_single:
            low, high = low.flat[0], high.flat[0]
        if self.dtype.kind == "f":
            lowest, highest = self.dtype_limits
            low, high = np.maximum(low, lowest), np.minimum(high, highest)
        if is_single:
            return low.item(), high.item()
        return np.broadcast_to(low, self.shape), np.broadcast_to(high, self.shape)

    @cached_property
    def dtype_limits(self) -> tuple[Any, Any]:
        """Lowest and highest finite values of the dtype."""
        if self.dtype.kind == "b":
            return False, True
        get_info = np.finfo if self.dtype.kind == "f" else np.iinfo
        limits = get_info(self.dtype)
        return self.dtype.type(limits.min), self.dtype.type(limits.max)

    def __str__(self) -> str:
        """Return dtype and shape for messages, such as `float32[3]`."""
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


#: Placeholder for the action of a space without leaves; its rows have no bytes.
EMPTY_LEAF: Final = Leaf("", (0,), np.dtype(np.uint8), spaces.Box(0, 1, (0,), np.uint8))


def leaves_of(space: Space[Any]) -> tuple[Leaf, ...]:
    """Return the leaves of a space.

    Raises:
      SpaceError: The space is not supported.
    """
    return tuple(_iter_leaves(space, "", MAX_DEPTH))


def custom_space_classes(space: Space[Any]) -> dict[str, str]:
    """Return a dict from names of user-defined space classes to kinds such as "box"."""
    kind, classes = kind_of(space), {}
    if not type(space).__module__.startswith("gymnasium.spaces"):
        classes[type(space).__qualname__] = kind
    for child in children_of(space, kind):
        classes |= custom_space_classes(child)
    return classes


def kind_of(space: Space[Any]) -> str:
    """Return the kind of a space, such as "box"; "" if it is not supported."""
    for known, kind in _KINDS.items():
        if isinstance(space, known):
            return kind
    is_text = space.dtype is not None and np.dtype(space.dtype).kind == "U"
    return "text" if is_text else ""


def children_of(space: Any, kind: str) -> list[Space[Any]]:
    """Return the direct subspaces of a space of this kind."""
    if kind == "graph":
        both = (space.node_space, space.edge_space)
        return [child for child in both if child is not None]
    if kind == "sequence":
        return [space.feature_space]
    inner: Any = getattr(space, "spaces", ())
    return list(inner.values() if kind == "dict" else inner)


def _iter_leaves(space: Any, path: str, depth: int) -> Iterator[Leaf]:
    if depth == 0:
        raise SpaceError(
            f"expected a space nested at most {MAX_DEPTH} levels deep; got more at "
            f"{path!r}; flatten the space in the env"
        )
    is_space = isinstance(space, Space)
    if not is_space:
        name = f"{type(space).__module__}.{type(space).__qualname__}"
        remedy = "set the space in the env's constructor"
        if name.startswith("gym."):
            remedy = "convert the env to Gymnasium's API, for example with Shimmy"
        elif isinstance(space, MethodType):  # as in PettingZoo
            remedy += "; envs of several agents must be converted to vector envs"
        raise SpaceError(
            f"expected a gymnasium.Space{_at_path(path)}; got {space!r:.200} of class "
            f"{name}; {remedy}"
        )
    kind = kind_of(space)
    children = children_of(space, kind)
    if kind in ("dict", "tuple"):
        keys = space.spaces if kind == "dict" else range(len(children))
        for key, child in zip(keys, children, strict=True):
            if type(key) not in (str, int):
                raise SpaceError(f"expected str or int keys in {space}; got {key!r}")
            yield from _iter_leaves(
                child, f"{path}/{key}" if path else str(key), depth - 1
            )
    elif (
        kind in FIXED_SHAPE_KINDS
        and space.shape is not None
        and space.dtype is not None
    ):
        _check_dtype(space, path)
        # Processes that share rows describe dtypes to each other without a byte order.
        # `EnvRow.step` compares dtypes by identity, so do not use `newbyteorder`, which
        # always returns a new object.
        dtype = np.result_type(np.dtype(space.dtype))
        yield Leaf(path, tuple(space.shape), dtype, space)
    elif kind and kind not in FIXED_SHAPE_KINDS:
        max_bytes = getattr(space, "max_bytes", None)
        if kind == "text" and not isinstance(space, spaces.Text):
            space = _ANY_TEXT
        parts = [list(_iter_leaves(child, "", depth - 1)) for child in children]
        size = _max_row_bytes(space, kind, parts) if max_bytes is None else max_bytes
        if type(size) is not int or not _HEADER_BYTES <= size <= MAX_ROW_BYTES:
            raise SpaceError(
                f"max_bytes of {space}{_at_path(path)}: expected {_HEADER_BYTES} to "
                f"{MAX_ROW_BYTES}; got {size!r:.99}"
            )
        if kind == "text" and (not space.characters or space.min_length > size):
            raise SpaceError(
                f"expected a Text with a non-empty charset, whose shortest value fits "
                f"into {size} bytes{_at_path(path)}; got {space!s:.200}"
            )
        yield Leaf(path, (size,), np.dtype(np.uint8), space, is_encoded=True)
    else:
        raise SpaceError(
            f"expected a Box, Discrete, MultiBinary, MultiDiscrete, Text, Sequence, "
            f"Graph, OneOf, or a Dict or Tuple of them; got {space}, a "
            f"{type(space).__qualname__}{_at_path(path)}; derive its class from one "
            f"of these, or convert its values in a wrapper"
        )


def _max_row_bytes(space: Any, kind: str, parts: Iterable[Iterable[Leaf]]) -> int:
    """Return the row size in bytes of an encoded leaf.

    If the length of values is limited, the row holds the longest value. Otherwise, it
    holds `_NUM_ITEMS` items and has at least 4 KiB.
    """
    sizes = [
        sum(
            _HEADER_BYTES + len(x.path.encode()) + 8 * len(x.shape) + x.nbytes
            for x in part
        )
        for part in parts
    ]
    size: int
    if kind == "text":
        size = space.max_length * max(len(c.encode()) for c in space.characters or "?")
    elif kind == "one_of":
        size = max(sizes)
    else:
        row_sizes = (n * size for n, size in zip(_NUM_ITEMS, sizes, strict=False))
        size = max(sum(row_sizes), _DEFAULT_ROW_BYTES - _HEADER_BYTES)
    return min(_HEADER_BYTES + size, MAX_ROW_BYTES)


def _at_path(path: str) -> str:
    return f" at {path!r}" if path else ""


def _check_dtype(space: Space[Any], path: str) -> None:
    try:
        codec.dtype_code(np.dtype(space.dtype))
    except codec.CodecError as error:
        raise SpaceError(f"space {space}{_at_path(path)}: {error}") from None


def flatten(space: Space[Any], value: Any, *, allows_more: bool = False) -> list[Any]:
    """Split a value or batch of a space into the values of its leaves, in leaf order.

    With `allows_more`, dicts may have more keys than the space.

    Raises:
      SpaceError: The value is not nested in the same way as the space.
    """
    if isinstance(space, spaces.Dict):
        keys = space.spaces.keys()
        # The check for a dict is redundant, but faster than the one for a Mapping.
        is_dict = isinstance(value, (dict, Mapping))
        is_valid = is_dict and keys <= value.keys()
        if not is_valid or (len(value) > len(keys) and not allows_more):
            actual = list(value) if is_dict else type(value).__name__
            raise SpaceError(
                f"expected a dict with the keys {list(space.spaces)}; got {actual}"
            )
        return [
            leaf
            for key in keys
            for leaf in flatten(space[key], value[key], allows_more=allows_more)
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
            for leaf in flatten(child, item, allows_more=allows_more)
        ]
    return [value]


def unflatten(space: Space[Any], leaves: Iterable[Any]) -> Any:
    """Rebuild a nested value of the space from its leaves; the inverse of `flatten`."""
    remaining = iter(leaves)  # shared by the recursive calls
    if isinstance(space, spaces.Dict):
        return {key: unflatten(child, remaining) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(unflatten(child, remaining) for child in space.spaces)
    return next(remaining)


def unbatch(space: Space[Any], batch: Any, rows: Iterable[int]) -> list[Any]:
    """Return the values of the given rows of a batch; `space` is the space of one row.

    Unlike Gymnasium's `iterate`, this function also works if a Dict or Tuple contains
    an empty Dict or Tuple.
    """
    leaves = flatten(space, batch)
    return [unflatten(space, [leaf[row] for leaf in leaves]) for row in rows]


def is_finite(array: Array) -> bool:
    """Return whether an array has no NaN and no infinity."""
    if array.dtype.kind != "f" or not array.size:
        return True
    # argmin and argmax return the position of NaN if there is one. For small arrays,
    # they take a third of the time of other reductions.
    lowest, highest = array.item(array.argmin()), array.item(array.argmax())
    return math.isfinite(lowest) and math.isfinite(highest)


def is_uniform(value: Array) -> bool:
    """Return whether all elements of a non-empty array are equal."""
    return not any(value.strides) or bool((value == value.flat[0]).all())
