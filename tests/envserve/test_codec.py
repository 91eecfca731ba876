"""Plain values survive a round trip; hostile bytes raise CodecError."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from envserve.spaces import codec
from envserve.spaces.codec import DTYPES, CodecError, decode, encode

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


def are_identical(left: Any, right: Any) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


@given(plain)
def test_plain_values_are_decoded_with_equal_value_and_type(value: Any) -> None:
    again = decode(encode(value), max_bytes=1 << 24)
    assert again == value
    assert type(again) is type(value)


@given(arrays)
def test_arrays_are_decoded_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    assert are_identical(decode(encode(array)), array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_code_and_survives_a_round_trip(dtype: np.dtype[Any]) -> None:
    assert codec.dtype_from_code(codec.dtype_code(dtype)) == dtype
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert are_identical(decode(encode({"a": [array]}))["a"][0], array)


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
    assert are_identical(decode(encode(array)), np.ascontiguousarray(array))


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
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([1j]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", np.int8)]),
        np.zeros((1,) * 9),
        object(),
        {1, 2},
        1j,
        2**64,
        "\ud800",
        lambda: None,
        msgpack.Timestamp(1),
        msgpack.ExtType(5, b""),
        {(1, 2): "a tuple as a key"},
        [0] * (2**16 + 1),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_unsupported_values_raise_codec_error_when_encoded(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value)
    with pytest.raises(CodecError):
        encode({"deeper": [value]})


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_nesting_has_the_same_limit_on_both_sides() -> None:
    assert decode(encode(nested(32))) == nested(32)
    with pytest.raises(CodecError, match="nested deeper than 32"):
        encode(nested(33))
    with pytest.raises(CodecError, match="nested deeper than 32"):
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
        msgpack.packb(msgpack.Timestamp(1, 2)),
        msgpack.packb({"t": [msgpack.Timestamp(1)]}),
        b"\x81" + msgpack.packb(msgpack.Timestamp(1)) + b"\x01",
        array_bytes(12, (1,), b"x"),
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
