"""Encode plain values as bytes: scalars, strings, lists, dicts and NumPy arrays.

The format is msgpack with extension types for arrays, NumPy scalars, tuples and large
ints; the dtype is a number from a fixed table. Decoding never executes code. Both sides
validate the bytes with `check` first, so that a value that is nested too deeply, too
large or truncated is rejected before any object is created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np

from envserve.errors import CodecError as CodecError

#: The dtypes that messages and shared memory may contain; the index is the wire code.
DTYPES: Final = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}

#: Maps the kind of a string dtype to the dtype in which string arrays are encoded: code
#: points or bytes, with the string width as an additional last dimension. Values may
#: contain string arrays, but spaces may not.
_STRINGS: Final[dict[str, np.dtype[Any]]] = {"U": np.dtype("<u4"), "S": np.dtype("u1")}
_STRING_KINDS: Final = dict(enumerate(_STRINGS, len(DTYPES)))

_ARRAY: Final = 1
_SCALAR: Final = 2
_TUPLE: Final = 3
_LARGE_INT: Final = 4
_LARGE_INT_BYTES: Final = 32
_MAX_DIMENSIONS: Final = 8
_MAX_DEPTH: Final = 32
#: Maximum number of items in a list, or of pairs in a dict.
_MAX_ITEMS: Final = 1 << 16
#: Cost of a value of each extension type: the number of Python scalars that take as
#: long to decode. The items of a tuple are counted in addition.
_COSTS: Final = {_ARRAY: 16, _SCALAR: 4, _TUPLE: 4, _LARGE_INT: 4}
#: Encoded size of a value in bytes, indexed by its first byte; 0 if the first byte does
#: not determine the size.
_SIZES_BY_FIRST_BYTE: Final = bytes(
    [
        *[1] * 0x80,  # small ints
        *[0] * 0x20,  # short maps and lists
        *range(1, 0x21),  # short strings
        *(1, 0, 1, 1),  # None, an unused byte, False and True
        *[0] * 6,  # headers of bytes and extension values
        *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # floats, unsigned and signed ints
        *[0] * 12,  # headers of extension values, strings, lists and maps
        *[1] * 0x20,  # small negative ints
    ]
)
#: Maps the first byte of a header to the width of the length field in bytes, and to the
#: unit of the length: 0 means bytes, -1 items, and -2 key-value pairs. A unit n >= 1
#: marks an extension value: `n + length` bytes follow the length field, the first of
#: which is the extension type. The comments are the names in the msgpack specification.
_HEADERS: Final = {
    0xC4: (1, 0),  # bin 8
    0xC5: (2, 0),  # bin 16
    0xC6: (4, 0),  # bin 32
    0xC7: (1, 1),  # ext 8
    0xC8: (2, 1),  # ext 16
    0xC9: (4, 1),  # ext 32
    0xD4: (0, 2),  # fixext 1
    0xD5: (0, 3),  # fixext 2
    0xD6: (0, 5),  # fixext 4
    0xD7: (0, 9),  # fixext 8
    0xD8: (0, 17),  # fixext 16
    0xD9: (1, 0),  # str 8
    0xDA: (2, 0),  # str 16
    0xDB: (4, 0),  # str 32
    0xDC: (2, -1),  # array 16
    0xDD: (4, -1),  # array 32
    0xDE: (2, -2),  # map 16
    0xDF: (4, -2),  # map 32
}
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_EXTENSIONS: Final = frozenset(kind for kind, form in _HEADERS.items() if form[1] > 0)

#: Exceptions of NumPy and Python about values of a wrong type or form. Other exceptions
#: may come from signal handlers, so callers must not treat them as invalid values.
CONVERSION_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    BufferError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_Buffer = bytes | bytearray | memoryview


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the wire code of a dtype.

    Raises:
      CodecError: The dtype has no wire code.
    """
    code = _CODES.get(dtype.newbyteorder("="))
    if code is None:
        names = ", ".join(str(d) for d in DTYPES)
        raise CodecError(f"expected one of the dtypes {names}; got {dtype}")
    return code


def dtype_from_code(code: object) -> np.dtype[Any]:
    """Return the dtype for a wire code.

    Raises:
      CodecError: The code is unknown.
    """
    if type(code) is not int or not 0 <= code < len(DTYPES):
        raise CodecError(f"expected a dtype code below {len(DTYPES)}; got {code!r}")
    return DTYPES[code]


def encode(value: Any, *, keep_types: bool = False) -> bytes:
    """Encode a plain value, which may contain NumPy scalars and arrays, as msgpack.

    Args:
      value: The value.
      keep_types: Whether tuples and NumPy scalars keep their types, as values of envs
        and users must. Arrays of other libraries then become NumPy arrays, and an Enum
        becomes its value. If False, tuples become lists, and NumPy scalars become
        Python scalars.

    Raises:
      CodecError: The value is not plain, or `decode` would reject it.
      Exception: A method of a user-defined container or array raised an exception.
    """
    try:
        packed: bytes = _pack_exactly(value) if keep_types else _pack(value)
    except CodecError:
        raise
    except UnicodeEncodeError as error:
        text = f"expected a valid Unicode text; got {error.object!a:.200}"
        raise CodecError(text) from None
    except CONVERSION_ERRORS as error:
        raise CodecError(f"cannot encode the value: {error}") from error
    check(packed)
    return packed


def explain(error: Exception, arguments: Mapping[str, Any]) -> str:
    """Return the text of an error, with the argument that cannot be encoded, if any.

    Args:
      error: The error that occurred when the arguments were encoded together.
      arguments: Maps names of arguments to their values.
    """
    for name, value in arguments.items():
        try:
            encode(value, keep_types=True)
        except CodecError as cause:
            return (
                f"{name}: {cause}; pass a plain value, or, if the envs run on this "
                f"host, pass this one in env_kwargs"
            )
    return str(error)


def decode(
    data: _Buffer, *, max_bytes: int = 1 << 20, max_values: int | None = None
) -> Any:
    """Decode the output of `encode`; arrays are writable copies.

    Args:
      data: Encoded bytes, possibly from an untrusted peer.
      max_bytes: Maximum length of the input.
      max_values: Maximum number of values; see `check`.

    Raises:
      CodecError: The input is too long, nested too deeply, or not a valid encoding.
    """
    if len(data) > max_bytes:
        raise CodecError(f"expected at most {max_bytes} bytes; got {len(data)}")
    check(data, max_values)
    return unpack(data)


def unpack(data: _Buffer) -> Any:
    """Decode bytes that `check` has accepted.

    Raises:
      CodecError: The bytes contain an invalid string or array.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_decode_extension, strict_map_key=False)
    except CodecError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        # The repr of an error about hostile data may itself exceed the recursion limit.
        raise CodecError(f"not a valid encoding: {type(error).__name__}") from None


def check(
    data: _Buffer, max_values: int | None = None, max_depth: int = _MAX_DEPTH
) -> int:
    """Validate an encoded value and count its values, without decoding it.

    Args:
      data: Encoded bytes.
      max_values: Maximum number of values, including dict keys, where an array of
        numbers counts as 16, and a tuple or NumPy scalar as 4. None: no limit, and each
        of these counts as 1.
      max_depth: Maximum number of nested lists, dicts and tuples.

    Returns:
      The number of values.

    Raises:
      CodecError: There are too many values, they are nested too deeply, or the bytes
        are not a valid encoding.
    """
    offset, end, sizes = 0, len(data), _SIZES_BY_FIRST_BYTE
    limit = remaining = end if max_values is None else max_values
    # Number of values that are left in the innermost open list or map.
    num_left, is_map = 1, False
    # `num_left` and `is_map` of the lists and maps around the innermost one.
    outer: list[tuple[int, bool]] = []
    while offset < end:
        while not num_left and outer:
            num_left, is_map = outer.pop()
        if not num_left:
            break
        num_left -= 1
        kind = data[offset]
        if sizes[kind]:  # the usual case
            offset += sizes[kind]
            continue
        start, body = offset, 0
        if kind < 0xA0:  # a short list or map
            offset, count = offset + 1, (kind & 15) << (kind < 0x90)
        else:
            offset, count = _read_header(data, offset, kind)
            if kind in _EXTENSIONS:
                body = start + 2 + _HEADERS[kind][0]
                remaining -= _COSTS[data[body - 1]] - 1 if max_values is not None else 0
        is_tuple = body > 0 and data[body - 1] == _TUPLE
        remaining -= max(count, 0)
        # Every item takes at least one byte, so a larger count cannot be valid.
        if remaining < 0 or count > end - offset:
            raise CodecError(
                f"expected at most {limit} values (an array of numbers counts as "
                f"{_COSTS[_ARRAY]}); got more"
            )
        if count < 0 and not is_tuple:
            continue
        if is_map and num_left & 1:
            raise CodecError("expected a scalar as a dict key; got a list or dict")
        if len(outer) == max_depth:
            raise CodecError(f"expected at most {_MAX_DEPTH} nested levels; got more")
        if is_tuple:
            depth = max_depth - len(outer)
            remaining -= check(
                data[body:offset], remaining if max_values is not None else None, depth
            )
        elif count:
            outer.append((num_left, is_map))
            num_left, is_map = count, kind in _MAPS
    if offset != end or num_left or any(count for count, _ in outer):
        raise CodecError("not a valid encoding: truncated, or with trailing bytes")
    return limit - remaining


def _read_header(data: _Buffer, offset: int, kind: int) -> tuple[int, int]:
    """Parse a header that begins with a byte in `_HEADERS`.

    Returns:
      The offset of the first item and the number of items; or, for a value without
      items, the offset of its end and -1.
    """
    if kind not in _HEADERS:
        raise CodecError(f"not a valid encoding: no value begins with {kind:#x}")
    width, unit = _HEADERS[kind]
    start = offset + 1 + width
    length = int.from_bytes(data[offset + 1 : start], "big")
    if unit < 0:
        if length > _MAX_ITEMS:
            raise CodecError(
                f"expected at most {_MAX_ITEMS} items; got {length}; send numbers as a "
                f"NumPy array"
            )
        return start, -unit * length
    if unit and (start >= len(data) or data[start] not in _COSTS):
        raise CodecError("unknown extension type")
    return start + length + unit, -1


def _encode_other(value: Any) -> Any:
    """Convert a NumPy array or scalar for msgpack; scalars become Python scalars."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _encode_array(value))
    raise CodecError(
        f"cannot encode a value of type {type(value).__name__}; expected numbers, "
        f"strings, bytes, lists, dicts or NumPy arrays"
    )


def _encode_exactly(value: Any) -> Any:
    """Convert a value for msgpack such that `decode` restores its type."""
    while isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _encode_array(as_numpy(np.asarray(value))))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _pack_exactly([*value]))
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        data = value.to_bytes(_LARGE_INT_BYTES, "little", signed=True)
        return msgpack.ExtType(_LARGE_INT, data)
    kind: Any
    for kind in (bool, int, float, str, bytes, list):
        if isinstance(value, kind):  # an instance of a subclass, or an Enum's value
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    if value is not None and hasattr(type(value), "__array__"):
        value = as_numpy(value)
    return value if value is None else _encode_other(value)


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Convert an array of any library that has `__array__` (JAX, PyTorch) to NumPy.

    Numbers whose dtype NumPy lacks, such as bfloat16, become float32.
    """
    if hasattr(value, "detach"):  # a tensor of PyTorch
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except TypeError:  # PyTorch does not convert bfloat16
        array = np.asarray(value.float())
    if array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32):
        return array.astype(np.float32)
    return array


_pack: Final = partial(msgpack.packb, default=_encode_other)
_pack_exactly: Final = partial(
    msgpack.packb, default=_encode_exactly, strict_types=True
)


def _encode_array(value: np.ndarray[Any, Any]) -> bytes:
    kind = value.dtype.kind
    if kind in _STRINGS:
        code = len(DTYPES) + "US".index(kind)
        if not value.dtype.itemsize:
            value = value.astype(f"{kind}1")
        items = np.array(value, value.dtype.newbyteorder("<"), order="C")
        items = items.reshape(*items.shape, 1).view(_STRINGS[kind])
        _check_text(items)
    else:
        code, items = dtype_code(value.dtype), value
    if items.ndim > _MAX_DIMENSIONS:
        raise CodecError(f"expected at most 8 dimensions; got {items.ndim}")
    header = bytes([code, items.ndim])
    shape = b"".join(size.to_bytes(8, "little") for size in items.shape)
    body = np.ascontiguousarray(items, items.dtype.newbyteorder("<")).tobytes()
    return header + shape + body


def _decode_extension(code: int, data: bytes) -> Any:
    if code == _LARGE_INT:
        if len(data) != _LARGE_INT_BYTES:
            raise CodecError(f"expected an int of {_LARGE_INT_BYTES} bytes")
        return int.from_bytes(data, "little", signed=True)
    if code == _TUPLE:
        items = unpack(data)
        if type(items) is not list:
            raise CodecError("expected a list as the items of a tuple")
        return tuple(items)
    array = _decode_array(data)
    if code == _ARRAY:
        return array
    if array.ndim:
        raise CodecError("expected a scalar without dimensions")
    return array[()]


def _decode_array(data: bytes) -> np.ndarray[Any, Any]:
    if len(data) < 2:
        raise CodecError("truncated array header")
    kind, dimensions = _STRING_KINDS.get(data[0]), data[1]
    dtype = _STRINGS[kind] if kind else dtype_from_code(data[0])
    start = 2 + 8 * dimensions
    if dimensions > _MAX_DIMENSIONS or len(data) < start:
        raise CodecError("truncated array header")
    shape = tuple(int.from_bytes(data[i : i + 8], "little") for i in range(2, start, 8))
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise CodecError("the length of an array does not match its shape")
    flat = np.frombuffer(data, dtype.newbyteorder("<"), offset=start)
    array = flat.reshape(shape).astype(dtype.newbyteorder("="))
    if kind is None:
        return array
    if not shape or not shape[-1]:
        raise CodecError(
            f"expected the string width as the last dimension; got shape {shape}"
        )
    _check_text(array)
    return array.view(f"{kind}{shape[-1]}").reshape(shape[:-1])


def _check_text(units: np.ndarray[Any, Any]) -> None:
    """Raise CodecError for numbers that are not Unicode code points."""
    if ((units >= 0xD800) & (units < 0xE000) | (units > 0x10FFFF)).any():
        raise CodecError("expected Unicode code points in an array of strings")
