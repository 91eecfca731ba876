"""Plain values to bytes and back: scalars, strings, lists, dicts and arrays.

Msgpack with one extension for NumPy arrays, whose dtype is a number from a closed
table. Nothing that is decoded can run code. `check` walks over the bytes first, on
both ends, so that nothing is made of what is too deep, too much, or cut short.
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
    "check",
    "decode",
    "dtype_code",
    "dtype_from_code",
    "encode",
    "unpack",
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
#: An array takes as long as so many other values.
_ARRAY_VALUES: Final = 16
#: Bytes of a value whose first byte says it all; 0 for others.
_SIZES: Final = bytes(
    [
        *[1] * 0x80,
        *[0] * 0x20,  # short maps and lists
        *range(1, 0x21),  # short strings
        *(1, 0, 1, 1, 0, 0, 0, 0, 0, 0),
        *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # numbers
        *[0] * 0x0C,
        *[1] * 0x20,
    ]
)
#: By first byte: bytes of the length that follows, and what it counts: a type and so
#: many bytes (from 1 on), bytes (0), items (-1), or pairs (-2).
_FORMS: Final = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1)},
    **{0xC9: (4, 1), 0xD4: (0, 2), 0xD5: (0, 3), 0xD6: (0, 5), 0xD7: (0, 9)},
    **{0xD8: (0, 17), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0), 0xDC: (2, -1)},
    **{0xDD: (4, -1), 0xDE: (2, -2), 0xDF: (4, -2)},
}
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_EXTENSIONS: Final = frozenset(kind for kind, form in _FORMS.items() if form[1] > 0)

_Buffer = bytes | bytearray | memoryview


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
    try:
        packed = bytes(msgpack.packb(value, default=_encode_other))
    except CodecError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot encode the value: {error}") from error
    check(packed)
    return packed


def decode(
    data: _Buffer, *, max_bytes: int = 1 << 20, max_values: int | None = None
) -> Any:
    """Decodes what `encode` made; arrays come back as own, writable copies.

    Args:
      data: The bytes, as received from a peer that is not trusted.
      max_bytes: Longest input that is looked at.
      max_values: As for `check`.

    Raises:
      CodecError: The bytes are too many, too deep, or not a valid encoding.
    """
    if len(data) > max_bytes:
        raise CodecError(f"expected at most {max_bytes} bytes; got {len(data)}")
    check(data, max_values)
    return unpack(data)


def unpack(data: _Buffer) -> Any:
    """Decodes what `check` has walked over; raises CodecError as `decode` does."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False)
    except CodecError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        # repr(error) of hostile data can itself recurse; its type is enough.
        raise CodecError(f"not a valid encoding: {type(error).__name__}") from None


def check(data: _Buffer, max_values: int | None = None) -> int:
    """Walks over an encoded value, which takes less than to decode it.

    Args:
      data: The bytes.
      max_values: How many values there may be inside, keys among them; an array of
        numbers counts as 16. None: any number.

    Returns:
      How many there are.

    Raises:
      CodecError: They are more, or nested too deep, or no encoding of ours.
    """
    at, end, sizes = 0, len(data), _SIZES
    array_cost = 0 if max_values is None else _ARRAY_VALUES - 1
    most = room = end if max_values is None else max_values
    left, is_map = 1, False  # values to come in what is open
    outer: list[tuple[int, bool]] = []  # the same of what that stands in
    while at < end:
        while not left and outer:
            left, is_map = outer.pop()
        if not left:
            break
        left -= 1
        kind = data[at]
        if sizes[kind]:  # the usual case
            at += sizes[kind]
            continue
        if kind < 0xA0:  # a short list or map
            at, count = at + 1, (kind & 15) << (kind < 0x90)
        else:
            at, count = _measure(data, at, kind)
        room -= count if count >= 0 else array_cost * (kind in _EXTENSIONS)
        # Each takes a byte: who announces more than there are is not believed.
        if room < 0 or count > end - at:
            raise CodecError(
                f"expected at most {most} values, of which an array of "
                f"numbers counts as {_ARRAY_VALUES}; got more"
            )
        if count < 0:
            continue
        if is_map and left & 1:
            raise CodecError("no plain form for a list or dict as a key")
        if len(outer) == _MAX_DEPTH:
            raise CodecError(f"nested deeper than {_MAX_DEPTH}")
        if count:
            outer.append((left, is_map))
            left, is_map = count, kind in _MAPS
    if at != end or left or any(count for count, _ in outer):
        raise CodecError("not a valid encoding: it does not end where it should")
    return most - room


def _measure(data: _Buffer, at: int, kind: int) -> tuple[int, int]:
    """Returns where a value ends, and -1; or where its items begin, and how many."""
    if kind not in _FORMS:
        raise CodecError(f"not a valid encoding: no value begins with {kind:#x}")
    width, what = _FORMS[kind]
    start = at + 1 + width
    length = int.from_bytes(data[at + 1 : start], "big")
    if what < 0:
        if length > _MAX_ITEMS:
            raise CodecError(
                f"expected at most {_MAX_ITEMS} items; got {length}; send many numbers "
                f"as an array"
            )
        return start, -what * length
    if what and data[start : start + 1] != bytes([_ARRAY_EXTENSION]):
        raise CodecError("no plain form for an extension type that is no array")
    return start + length + what, -1


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
