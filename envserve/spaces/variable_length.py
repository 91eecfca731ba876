"""Values without a shape as rows of bytes: texts, sequences, graphs, choices.

A row is uint8 `[bytes]`: four bytes of length, little-endian; so many of `codec`'s
encoding; zeros. Length 0 is a row that nobody has written, like those of a lost
episode: it stands for Gymnasium's `create_empty_array`. What is decoded may come from a
peer: it is bounded by its row, and has the form that its space says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from envserve.errors import CodecError, RemoteProtocolError, SpaceError
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import FIXED, Leaf, flatten, kind_of, unflatten

__all__ = ["action_values", "decode_observation", "decode_row", "encode_row"]

Array = np.ndarray[Any, Any]

_HEAD: Final = 4  # bytes
#: Values in one row, of which an array counts as 16: each takes microseconds to read.
_MAX_VALUES: Final = 1 << 13
#: The same in all rows of a step: it takes a second or two to read them.
_MAX_BATCH_VALUES: Final = 1 << 18
#: What comes of reading a value that has another form than its space.
_MISFITS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def encode_row(leaf: Leaf, value: Any, *, is_strict: bool = False) -> Array:
    """Returns the row of a value, uint8 `[leaf.nbytes]`.

    Raises:
      SpaceError: The value has not the form of its space, or takes too many bytes; if
        `is_strict`, also if its space does not contain it.
    """
    try:
        data = codec.encode(value)
        size = _HEAD + len(data)
        if size > leaf.nbytes:
            raise CodecError(
                f"expected a value that takes at most {leaf.nbytes} bytes; got {size}; "
                f"give a shorter one, or set max_bytes of its space to more"
            )
        data = len(data).to_bytes(_HEAD, "little") + data
        row = np.frombuffer(data.ljust(leaf.nbytes, b"\0"), np.uint8)
        found = decode_row(leaf, row)
        _check(not is_strict or leaf.space.contains(found), leaf.space, found)
    except CodecError as error:
        raise SpaceError(str(error)) from None
    return row


def decode_row(leaf: Leaf, row: Array) -> Any:
    """Returns the value of a row; raises CodecError if there is none in it."""
    return _decode(leaf, row)[0]


def _decode(leaf: Leaf, row: Array) -> tuple[Any, int]:
    data = row.tobytes()
    stop = _HEAD + int.from_bytes(data[:_HEAD], "little")
    if stop == _HEAD:
        return copy.deepcopy(leaf.empty[0]), leaf.empty[1]
    try:
        _check(stop <= len(data), leaf.space, f"{stop} bytes")
        with np.errstate(over="raise", invalid="raise"):
            count = codec.check(data[_HEAD:stop], _MAX_VALUES)
            return _read(leaf.space, codec.unpack(data[_HEAD:stop])), count
    except CodecError:
        raise
    except _MISFITS as error:
        text = f"{type(error).__name__}: {error}"
        raise CodecError(f"expected a value of {leaf.space!s:.200}; {text}") from None


def decode_observation(
    spec: EnvSpec,
    env_indices: Sequence[int] | Array,
    observation: Any,
    *,
    is_whole: Array,
    ended: Array | None = None,
) -> Any:
    """Makes tuples of values of the rows of encoded leaves, as Gymnasium batches them.

    Args:
      spec: Spec of the envs.
      env_indices: Which envs the rows are of.
      observation: Arrays `[n, ...]`, nested as their space.
      is_whole: bool `[n]`; of a row that is not, nobody may have finished the value.
      ended: Rows to look at, bool `[n]`; all others share an empty value.

    Raises:
      CodecError: A row that is whole holds no value of its space; with the env.
      RemoteProtocolError: All rows together hold more than is read at once.
    """
    columns, left = flatten(spec.observation_space, observation), _MAX_BATCH_VALUES
    for at, leaf in enumerate(spec.observation_leaves):
        if not leaf.is_encoded:
            continue
        values = [leaf.empty[0]] * len(env_indices)
        chosen = range(len(values)) if ended is None else ended.nonzero()[0].tolist()
        for i in chosen:
            values[i], count = _decode_of(
                env_indices[i], leaf, columns[at][i], is_whole[i]
            )
            left -= count
            if left < 0:
                raise RemoteProtocolError(
                    f"Env {env_indices[i]}: observation {leaf.path!r}: expected at "
                    f"most {_MAX_BATCH_VALUES} values in the rows of a step, of which "
                    f"an array counts as 16; got more; have arrays in the env's "
                    f"spaces, or fewer envs in a batch"
                )
        columns[at] = tuple(values)
    return unflatten(spec.observation_space, columns)


def _decode_of(
    env_index: int, leaf: Leaf, row: Array, is_whole: bool
) -> tuple[Any, int]:
    try:
        return _decode(leaf, row)
    except CodecError as error:
        if not is_whole:  # its worker was killed as it wrote
            return leaf.empty[0], _MAX_VALUES
        raise CodecError(
            f"Env {env_index}: observation {leaf.path!r}: {error}; its host sends what "
            f"its spaces do not allow"
        ) from None


def action_values(spec: EnvSpec, arrays: Iterable[Array]) -> list[Any]:
    """Returns actions as envs expect them, from one array `[n, ...]` per leaf."""
    per_leaf = []
    for leaf, array in zip(spec.action_leaves, arrays, strict=True):
        values = list(array)
        if leaf.is_encoded:
            values = [decode_row(leaf, row) for row in array]
        elif not leaf.shape and isinstance(leaf.space, spaces.Box):
            values = [np.asarray(value) for value in values]
        per_leaf.append(values)
    space = spec.action_space
    if spec.action_leaves[0].space is space:
        return per_leaf[0]
    return [unflatten(space, values) for values in zip(*per_leaf, strict=True)]


def _read(space: Any, plain: Any, *, is_batch: bool = False) -> Any:
    """Returns a value, or a batch of values, in the form that its space says."""
    kind = kind_of(space)
    if kind in FIXED:
        array = np.asarray(plain)
        value = array.astype(space.dtype)
        is_right = array.dtype.kind in "biuf" and array.shape[is_batch:] == space.shape
        # Arrays without any content take no bytes, however many there are.
        is_right = is_right and not (is_batch and len(array) > _MAX_VALUES)
        is_exact = value.dtype.kind == "f" or (value == array).all()
        _check(is_right and is_exact, space, array)
        return value[()] if kind == "discrete" else value
    if kind == "dict":
        is_right = isinstance(plain, dict) and plain.keys() == space.spaces.keys()
        _check(is_right, space, plain)
        return {
            key: _read(child, plain[key], is_batch=is_batch)
            for key, child in space.spaces.items()
        }
    if kind == "text" and not is_batch:
        _check(isinstance(plain, str), space, plain)
        return plain
    if kind == "sequence" and space.stack and not is_batch:
        return _read_batch(space.feature_space, plain)[0]
    _check(isinstance(plain, list), space, plain)
    if kind == "tuple":
        pairs = zip(space.spaces, plain, strict=True)
        return tuple(_read(child, each, is_batch=is_batch) for child, each in pairs)
    if is_batch or kind == "sequence":
        item = space if is_batch else space.feature_space
        return tuple(_read(item, each) for each in plain)
    if kind == "one_of":
        which, value = plain
        _check(type(which) is int and 0 <= which < len(space.spaces), space, which)
        return np.int64(which), _read(space.spaces[which], value)
    nodes, edges, links = plain
    nodes, _ = _read_batch(space.node_space, nodes)
    if edges is not None or links is not None:
        edges, count = _read_batch(space.edge_space, edges)
        is_right = links.dtype.kind in "iu" and links.shape == (count, 2)
        _check(is_right, space, links)
    return spaces.GraphInstance(nodes, edges, links)


def _read_batch(space: Any, plain: Any) -> tuple[Any, int]:
    """Returns a batch of values, and how many they are."""
    batch = _read(space, plain, is_batch=True)
    lengths = {len(column) for column in flatten(space, batch)}
    _check(len(lengths) < 2, space, batch)
    return batch, max(lengths, default=0)


def _check(is_right: bool, space: Any, got: Any) -> None:
    if not is_right:
        if isinstance(got, np.ndarray):
            got = f"{got.dtype}{list(got.shape)}"
        raise CodecError(f"expected a value of {space!s:.200}; got {got!r:.100}")
