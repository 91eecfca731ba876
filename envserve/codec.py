"""Plain values to bytes and back: scalars, strings, lists, dicts and arrays.

Msgpack with one extension for NumPy arrays, whose dtype is a number from a closed
table. Nothing that is decoded can run code, and every limit is checked first.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgpack
import numpy as np

from envserve.errors import CodecError

__all__ = [
    "DTYPES",
    "CodecError",
    "decode",
    "dtype_code",
    "dtype_from_code",
    "encode",
]

#: The dtypes that may cross a process or host border; the index is the code.
DTYPES: Final = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}

_ARRAY_EXTENSION: Final = 1
_MAX_DIMENSIONS: Final = 8
_MAX_DEPTH: Final = 32
_MAX_ITEMS: Final = 1 << 16
_KEY_TYPES: Final = (str, bytes, int, float, type(None), np.generic)


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Returns the wire code of a dtype; raises CodecError if it has none."""
    code = _CODES.get(dtype.newbyteorder("="))
    if code is None:
        names = ", ".join(str(d) for d in DTYPES)
        raise CodecError(f"expected a dtype out of {names}; got {dtype}")
    return code


def dtype_from_code(code: object) -> np.dtype[Any]:
    """Returns the dtype of a wire code; raises CodecError for unknown codes."""
    if type(code) is not int or not 0 <= code < len(DTYPES):
        raise CodecError(f"expected a dtype code below {len(DTYPES)}; got {code!r}")
    return DTYPES[code]


def encode(value: Any) -> bytes:
    """Encodes a plain value, with NumPy scalars and arrays, as msgpack.

    Raises:
      CodecError: The value is not plain, or `decode` would refuse it.
    """
    _check_plain(value, _MAX_DEPTH)
    try:
        packed = msgpack.packb(value, default=_encode_other, strict_types=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot encode the value: {error}") from error
    return bytes(packed)


def decode(data: bytes | bytearray | memoryview, *, max_bytes: int = 1 << 20) -> Any:
    """Decodes what `encode` made; arrays come back as own, writable copies.

    Args:
      data: The bytes, as received from a peer that is not trusted.
      max_bytes: Longest input that is looked at.

    Raises:
      CodecError: The bytes are too many, too deep, or not a valid encoding.
    """
    if len(data) > max_bytes:
        raise CodecError(f"expected at most {max_bytes} bytes; got {len(data)}")
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_decode_extension,
            strict_map_key=False,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
        )
    except CodecError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        # repr(error) of hostile data can itself recurse; its type is enough.
        raise CodecError(f"not a valid encoding: {type(error).__name__}") from None
    _check_plain(value, _MAX_DEPTH)
    return value


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.ndim > _MAX_DIMENSIONS:
            raise CodecError(f"expected at most 8 dimensions; got {value.ndim}")
        header = bytes([dtype_code(value.dtype), value.ndim])
        shape = b"".join(size.to_bytes(8, "little") for size in value.shape)
        body = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
        return msgpack.ExtType(_ARRAY_EXTENSION, header + shape + body)
    raise CodecError(f"no plain form for a value of type {type(value).__name__}")


def _decode_extension(code: int, data: bytes) -> Any:
    if code != _ARRAY_EXTENSION or len(data) < 2:
        raise CodecError(f"unknown extension {code}")
    dtype, dimensions = dtype_from_code(data[0]), data[1]
    start = 2 + 8 * dimensions
    if dimensions > _MAX_DIMENSIONS or len(data) < start:
        raise CodecError("array header is cut short")
    shape = tuple(int.from_bytes(data[i : i + 8], "little") for i in range(2, start, 8))
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise CodecError("array has not the bytes that its shape needs")
    flat = np.frombuffer(data, dtype.newbyteorder("<"), offset=start)
    return flat.reshape(shape).astype(dtype)


def _check_plain(value: Any, depth: int) -> None:
    """Holds both sides to the same limits: what is sent can be read."""
    if isinstance(value, (msgpack.ExtType, msgpack.Timestamp)):
        raise CodecError(f"no plain form for a value of type {type(value).__name__}")
    if not isinstance(value, (list, tuple, dict)):
        return
    if depth == 0:
        raise CodecError(f"nested deeper than {_MAX_DEPTH}")
    if len(value) > _MAX_ITEMS:
        raise CodecError(
            f"expected at most {_MAX_ITEMS} items; got {len(value)}; "
            "send many numbers as an array"
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, _KEY_TYPES):
                raise CodecError(f"no plain form for a {type(key).__name__} as a key")
        value = value.values()
    for item in value:
        _check_plain(item, depth - 1)
