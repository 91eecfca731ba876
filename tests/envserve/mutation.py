"""Bytes that nobody should send, and what may come of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from envserve.errors import RemoteProtocolError


def read_or_refuse(reader: Callable[[bytes], object], data: bytes, *named: str) -> None:
    """Whatever the bytes are: they can be read, or the one error comes out."""
    try:
        reader(data)
    except RemoteProtocolError as error:
        assert any(name in str(error) for name in named or ("",))  # noqa: PT017
        assert str(error)  # noqa: PT017


def mutate(encoded: bytes, data: st.DataObject) -> bytes:
    mutant = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutant) - 1))
        mutant[position] = data.draw(st.integers(0, 255))
    return bytes(mutant)
