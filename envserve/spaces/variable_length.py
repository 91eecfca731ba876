"""Encode values without a fixed shape as rows of bytes: Text, Sequence, Graph, OneOf.

A row is uint8 `[bytes]`: a four-byte length (little-endian), that many bytes in
`codec`'s encoding, then zeros. A row of length 0 was never written, for example because
a fault ended the episode; it decodes to Gymnasium's `create_empty_array`. Rows may come
from an untrusted peer, so decoding checks that the value matches its space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from envserve.errors import CodecError, RemoteProtocolError, SpaceError
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import (
    FIXED_SHAPE_KINDS,
    Array,
    Leaf,
    flatten,
    kind_of,
    unflatten,
)

#: Size of the length field.
_HEADER_BYTES: Final = 4
#: Maximum number of values in a row, where an array counts as 16. It is limited because
#: each value takes microseconds to decode.
_MAX_VALUES: Final = 1 << 13
#: Maximum number of values in all rows of a step. Decoding this many values takes one
#: to two seconds.
_MAX_BATCH_VALUES: Final = 1 << 18


def encode_row(leaf: Leaf, value: Any, *, is_strict: bool = False) -> Array:
    """Encode a value as a row, uint8 `[leaf.nbytes]`.

    Args:
      leaf: An encoded leaf.
      value: A value of its space.
      is_strict: Whether `leaf.space.contains` must also accept the value.

    Raises:
      SpaceError: The value does not match its space, takes too many bytes, or, if
        `is_strict`, is not in the space.
    """
    try:
        data = codec.encode(value)
        size = _HEADER_BYTES + len(data)
        if size > leaf.nbytes:
            raise CodecError(
                f"expected a value of at most {leaf.nbytes} bytes; got {size}; "
                f"return a shorter value, or increase max_bytes of its space"
            )
        data = len(data).to_bytes(_HEADER_BYTES, "little") + data
        row = np.frombuffer(data.ljust(leaf.nbytes, b"\0"), np.uint8)
        decoded = decode_row(leaf, row)
        _check(not is_strict or leaf.space.contains(decoded), leaf.space, decoded)
    except CodecError as error:
        raise SpaceError(str(error)) from None
    return row


def decode_row(leaf: Leaf, row: Array) -> Any:
    """Decode the value of a row.

    Raises:
      CodecError: The row is not valid.
    """
    return _decode_and_count(leaf, row)[0]


def _decode_and_count(leaf: Leaf, row: Array) -> tuple[Any, int]:
    """Return the value of a row, and the number of values to charge for it."""
    data = row.tobytes()
    stop = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    if stop == _HEADER_BYTES:
        return copy.deepcopy(leaf.empty_value), leaf.empty_cost
    try:
        _check(stop <= len(data), leaf.space, f"{stop} bytes")
        with np.errstate(over="raise", invalid="raise"):
            count = codec.check(data[_HEADER_BYTES:stop], _MAX_VALUES)
            return _from_plain(
                leaf.space, codec.unpack(data[_HEADER_BYTES:stop])
            ), count
    except CodecError:
        raise
    except codec.CONVERSION_ERRORS as error:
        text = f"{type(error).__name__}: {error}"
        raise CodecError(f"expected a value of {leaf.space!s:.200}; {text}") from None


def decode_observation(
    spec: EnvSpec,
    env_indices: Sequence[int] | Array,
    observation: Any,
    *,
    is_complete: Array,
    ended: Array | None = None,
    host_of: Callable[[int], str] = lambda env_index: "local",
) -> Any:
    """Decode the encoded leaves of a batch of observations, as tuples of values.

    Args:
      spec: Spec of the envs.
      env_indices: Rows of the batch, for error messages.
      observation: Arrays `[n, ...]`, nested like the observation space.
      is_complete: bool `[n]`; False for rows that a killed worker may have written only
        partially.
      ended: bool `[n]`; True for rows whose episode has ended. Only these rows are
        decoded, and all others share one empty value. None: decode all rows.
      host_of: Function that returns the address of the server of a row, or "local".

    Returns:
      The observation, with a tuple of n values in place of each encoded array, as
      Gymnasium batches such spaces.

    Raises:
      CodecError: The value of a complete row does not match its space; the message
        names the env and its server.
      RemoteProtocolError: All rows together contain too many values.
    """
    columns, remaining = flatten(spec.observation_space, observation), _MAX_BATCH_VALUES
    for index, leaf in enumerate(spec.observation_leaves):
        if not leaf.is_encoded:
            continue
        values = [leaf.empty_value] * len(env_indices)
        rows = range(len(values)) if ended is None else ended.nonzero()[0].tolist()
        for row in rows:
            env_index = env_indices[row]
            try:
                values[row], count = _decode_and_count(leaf, columns[index][row])
            except CodecError as error:
                if is_complete[row]:
                    raise CodecError(
                        f"Env {env_index} ({host_of(env_index)}): observation "
                        f"{leaf.path!r}: {error}; the env's host sent a value that "
                        f"does not match the space"
                    ) from None
                count = _MAX_VALUES  # the worker was killed while it wrote
            remaining -= count
            if remaining < 0:
                raise RemoteProtocolError(
                    f"Env {env_index} ({host_of(env_index)}): observation "
                    f"{leaf.path!r}: expected at most {_MAX_BATCH_VALUES} values in "
                    f"all rows of a step (an array counts as 16); got more; use arrays "
                    f"in the env's spaces, or fewer envs per batch"
                )
        columns[index] = tuple(values)
    return unflatten(spec.observation_space, columns)


def decode_actions(spec: EnvSpec, arrays: Sequence[Array]) -> list[Any]:
    """Decode one action per row, in the form that envs expect.

    Args:
      spec: Spec of the envs.
      arrays: One array `[n, ...]` per action leaf. The arrays are copied, because envs
        may store their actions.

    Raises:
      CodecError: An encoded row is not valid.
    """
    if spec.single_action is not None:  # the usual case
        return list(arrays[0].copy())
    per_leaf = []
    for leaf, array in zip(spec.action_leaves, arrays, strict=True):
        if leaf.is_encoded:
            per_leaf.append([decode_row(leaf, row) for row in array])
        else:
            per_leaf.append(list(array.copy()))
    space = spec.action_space
    if spec.action_leaves[0].space is space:
        return per_leaf[0]
    return [unflatten(space, values) for values in zip(*per_leaf, strict=True)]


def _from_plain(space: Any, plain: Any, *, is_batch: bool = False) -> Any:
    """Convert a decoded value, or a batch of values, to the form of its space."""
    kind = kind_of(space)
    if kind in FIXED_SHAPE_KINDS:
        array = np.asarray(plain)
        value = array.astype(space.dtype)
        is_valid = array.dtype.kind in "biuf" and array.shape[is_batch:] == space.shape
        # Empty arrays take no bytes, so the row size does not limit their number.
        is_valid = is_valid and not (is_batch and len(array) > _MAX_VALUES)
        is_exact = value.dtype.kind == "f" or (value == array).all()
        _check(is_valid and is_exact, space, array)
        return value[()] if kind == "discrete" else value
    if kind == "dict":
        is_valid = isinstance(plain, dict) and plain.keys() == space.spaces.keys()
        _check(is_valid, space, plain)
        return {
            key: _from_plain(child, plain[key], is_batch=is_batch)
            for key, child in space.spaces.items()
        }
    if kind == "text" and not is_batch:
        _check(isinstance(plain, str), space, plain)
        return plain
    if kind == "sequence" and space.stack and not is_batch:
        return _batch_from_plain(space.feature_space, plain)[0]
    _check(isinstance(plain, list), space, plain)
    if kind == "tuple":
        pairs = zip(space.spaces, plain, strict=True)
        return tuple(
            _from_plain(child, part, is_batch=is_batch) for child, part in pairs
        )
    if is_batch or kind == "sequence":
        item = space if is_batch else space.feature_space
        return tuple(_from_plain(item, part) for part in plain)
    if kind == "one_of":
        choice, value = plain
        _check(type(choice) is int and 0 <= choice < len(space.spaces), space, choice)
        return np.int64(choice), _from_plain(space.spaces[choice], value)
    nodes, edges, links = plain
    nodes, _ = _batch_from_plain(space.node_space, nodes)
    if edges is not None or links is not None:
        edges, count = _batch_from_plain(space.edge_space, edges)
        is_valid = links.dtype.kind in "iu" and links.shape == (count, 2)
        _check(is_valid, space, links)
    return spaces.GraphInstance(nodes, edges, links)


def _batch_from_plain(space: Any, plain: Any) -> tuple[Any, int]:
    """Convert a decoded batch to the form of its space; return it and its length."""
    batch = _from_plain(space, plain, is_batch=True)
    lengths = {len(column) for column in flatten(space, batch)}
    _check(len(lengths) < 2, space, batch)
    return batch, max(lengths, default=0)


def _check(is_valid: bool, space: Any, actual: Any) -> None:
    if not is_valid:
        if isinstance(actual, np.ndarray):
            actual = f"{actual.dtype}{list(actual.shape)}"
        text = f"expected a value of {space!s:.200}; got {actual!r:.100}"
        raise CodecError(" ".join(text.split()))  # arrays are printed in several lines
