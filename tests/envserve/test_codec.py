"""Plain values survive a round trip; hostile bytes raise CodecError."""

from __future__ import annotations

import enum
import re
import tracemalloc
import types
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from envserve.spaces import codec
from envserve.spaces.codec import DTYPES, CodecError, decode, encode
from tests.oracle.identical import assert_identical

keys = st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=30)
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner),
    max_leaves=20,
)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, min_side=0))
)


def array_bytes(dtype: int, shape: tuple[int, ...], body: bytes = b"") -> bytes:
    """Return an encoded array with the given header, which may be invalid."""
    sizes = b"".join(size.to_bytes(8, "little") for size in shape)
    header = bytes([dtype, len(shape)]) + sizes
    return bytes(msgpack.packb(msgpack.ExtType(1, header + body)))


@given(plain)
def test_plain_values_are_decoded_with_equal_value_and_type(value: Any) -> None:
    again = decode(encode(value), max_bytes=1 << 24)
    assert again == value
    assert type(again) is type(value)


@given(st.integers(-(2**255), 2**255 - 1) | st.integers(-(2**65), 2**65))
def test_large_ints_are_decoded_with_equal_value(value: int) -> None:
    assert decode(encode({"a": (value,)}, keep_types=True)) == {"a": (value,)}


@given(arrays)
def test_arrays_are_decoded_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    assert_identical(decode(encode(array)), array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_code_and_survives_a_round_trip(dtype: np.dtype[Any]) -> None:
    assert codec.dtype_from_code(codec.dtype_code(dtype)) == dtype
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert_identical(decode(encode({"a": [array]}))["a"][0], array)


def test_dtype_codes_never_change() -> None:
    assert [str(dtype) for dtype in DTYPES] == [
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    ]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(24).reshape(4, 6)[::-2, 1::3],
        np.broadcast_to(np.float32(3), (2, 5)),
        np.asfortranarray(np.eye(3)),
    ],
    ids=["transposed", "strided", "broadcast", "fortran"],
)
def test_the_memory_layout_of_an_array_does_not_matter(
    array: np.ndarray[Any, Any],
) -> None:
    assert_identical(decode(encode(array)), np.ascontiguousarray(array))


def test_big_endian_array_keeps_its_values_in_native_order() -> None:
    for name in (">i4", ">u8", ">f2", ">f8"):
        array = np.array([1, 2, 300], name)
        again = decode(encode(array))
        assert again.dtype == array.dtype.newbyteorder("=")
        assert again.tolist() == array.tolist()


def test_decoded_arrays_are_writable_copies() -> None:
    data = bytearray(encode(np.zeros(3)))
    array = decode(data)
    array[0] = 1.0
    assert data == encode(np.zeros(3))


def test_array_scalars_become_python_scalars() -> None:
    values = [np.float32(0.5), np.int64(-3), np.bool_(True), np.uint8(200)]
    again = decode(encode(values))
    assert again == [0.5, -3, True, 200]
    assert [type(value) for value in again] == [float, int, bool, int]


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()], object),
        np.array(["\ud800"]),
        np.zeros((1,) * 8, "U2"),
        np.array([1j]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", np.int8)]),
        np.zeros((1,) * 9),
        object(),
        {1, 2},
        1j,
        2**255,
        "\ud800",
        lambda: None,
        msgpack.Timestamp(1),
        msgpack.ExtType(5, b""),
        {(1, 2): "a tuple as a key"},
        [0] * (2**16 + 1),
        np.longdouble(1),
        np.datetime64("2020-01-01"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
@pytest.mark.parametrize("keep_types", [False, True])
def test_unsupported_values_raise_codec_error_when_encoded(
    value: Any, keep_types: bool
) -> None:
    with pytest.raises(CodecError):
        encode(value, keep_types=keep_types)
    with pytest.raises(CodecError):
        encode({"deeper": [value]}, keep_types=keep_types)


def test_the_error_about_invalid_text_quotes_it() -> None:
    # Python decodes the bytes of a file name that are not UTF-8 to surrogates.
    with pytest.raises(CodecError, match=r"got 'h\\udcf6\.py'"):
        encode({"import": ["h\udcf6.py"]})


typed = st.recursive(
    scalars | arrays.filter(lambda array: array.ndim == 0).map(lambda array: array[()]),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.lists(inner, max_size=4),
    max_leaves=20,
)


@given(typed)
def test_tuples_and_numpy_scalars_keep_their_types(value: Any) -> None:
    again = decode(encode(value, keep_types=True), max_bytes=1 << 24)
    assert_identical(again, value)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["one", "", "\U0001f600\0"]),
        np.array([[b"x", b"yz"]]),
        np.array("scalar"),
        np.array([], "U3"),
        np.array(["swapped"], ">U7"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_strings_survive_a_round_trip(array: np.ndarray[Any, Any]) -> None:
    again = decode(encode(array))
    assert again.dtype == array.dtype.newbyteorder("=")
    assert again.shape == array.shape
    assert again.tolist() == array.tolist()


@pytest.mark.parametrize("text", [np.str_("a\u00e9"), np.str_(""), np.bytes_(b"x")])
def test_numpy_strings_keep_their_types(text: Any) -> None:
    assert_identical(decode(encode([text], keep_types=True)), [text])


class Size(enum.IntEnum):
    SMALL = 3


class Place(enum.Enum):
    HERE = ("x", 1)


class Inherited(dict[str, Any]):
    """A dict of another type."""


class Array:
    """An array of another library."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Size.SMALL, 3),
        (Place.HERE, ("x", 1)),
        (Inherited(a=(1,)), {"a": (1,)}),
        (types.MappingProxyType({"a": np.uint8(1)}), {"a": np.uint8(1)}),
        (Array(np.arange(3, dtype=np.int16)), np.arange(3, dtype=np.int16)),
        (Array(np.array(2.5, np.float32)), np.array(2.5, np.float32)),
    ],
)
def test_values_of_other_types_become_plain(value: Any, expected: Any) -> None:
    assert_identical(decode(encode([value], keep_types=True)), [expected])


def test_an_array_that_cannot_be_converted_raises_codec_error() -> None:
    with pytest.raises(CodecError, match="out of reach"):
        encode(Array(RuntimeError("out of reach")), keep_types=True)


def test_a_buffer_that_is_not_contiguous_raises_codec_error() -> None:
    with pytest.raises(CodecError, match="not C-contiguous"):
        encode(memoryview(b"abcdef")[::2])


def test_the_exception_of_a_signal_handler_is_not_converted() -> None:
    with pytest.raises(TimeoutError):
        encode(Array(TimeoutError()), keep_types=True)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_nesting_has_the_same_limit_on_both_sides() -> None:
    tuples: Any = 1
    for _ in range(32):
        tuples = (tuples,)
    assert decode(encode(tuples, keep_types=True)) == tuples
    with pytest.raises(CodecError, match="at most 32 nested levels"):
        encode([tuples], keep_types=True)
    assert decode(encode(nested(32))) == nested(32)
    with pytest.raises(CodecError, match="at most 32 nested levels"):
        encode(nested(33))
    with pytest.raises(CodecError, match="at most 32 nested levels"):
        decode(msgpack.packb(nested(33)))


def test_recursive_values_raise_codec_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CodecError):
        encode(value)


def test_input_longer_than_the_limit_raises_codec_error() -> None:
    data = encode(b"x" * 100)
    assert decode(data, max_bytes=len(data)) == b"x" * 100
    with pytest.raises(CodecError, match=f"at most {len(data) - 1} bytes"):
        decode(data, max_bytes=len(data) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode([1, 2])[:-1],
        encode(1) + b"\x00",
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.ExtType(2, b"\x00\x00")),
        msgpack.packb(msgpack.ExtType(2, b"\x01\x01" + b"\x01" + bytes(8))),
        msgpack.packb(msgpack.ExtType(3, b"")),
        msgpack.packb(msgpack.ExtType(3, b"\x05")),
        msgpack.packb(msgpack.ExtType(3, b"\x92\x05")),
        msgpack.packb(msgpack.ExtType(3, b"\x90\x90")),
        msgpack.packb(msgpack.ExtType(4, b"\x90")),
        b"\xc7\xff\x03\x90",
        b"\xc9\xff\xff\xff\xff\x03",
        array_bytes(12, (1, 1), b"\xff\xff\xff\xff"),
        array_bytes(12, (1, 1), b"\x00\xd8\x00\x00"),
        array_bytes(12, (2**40, 0)),
        array_bytes(12, ()),
        array_bytes(14, (1,), b"x"),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        msgpack.packb({"t": [msgpack.Timestamp(1)]}),
        b"\x81" + msgpack.packb(msgpack.Timestamp(1)) + b"\x01",
        array_bytes(1, (2,), b"x"),
        array_bytes(1, (1,), b"xy"),
        array_bytes(4, (2**61,)),
        array_bytes(4, (2**32, 2**32)),
        array_bytes(1, (0, 2**64 - 1)),
        array_bytes(1, (1,) * 9, b"x"),
        bytes(msgpack.packb(msgpack.ExtType(1, bytes([1, 8])))),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x90\x01",
        b"\xa1\xff",
        b"\x91" * 2000 + b"\x01",
        b"\x91" * 200_000,
    ],
)
def test_hostile_bytes_raise_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x01\x00\x00" + b"\x80" * 2**16,
        (b"\xdc\xff\xff" + b"\x90" * 65535) * 4,
        b"\xdc\x00\x04" + (b"\xdc\xff\xff" + b"\x80" * 65535) * 4,
    ],
    ids=["maps", "cut", "many lists"],
)
def test_small_input_takes_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode(data)
    except CodecError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 80 * len(data) + (1 << 20)
