"""Mutations of encoded bytes, for decoders of untrusted input."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from envserve.errors import RemoteProtocolError


def decode_or_reject(
    decoder: Callable[[bytes], object], data: bytes, *expected_words: str
) -> None:
    """Decode bytes; accept success, or a RemoteProtocolError with one of the words."""
    try:
        decoder(data)
    except RemoteProtocolError as error:
        assert any(name in str(error) for name in expected_words or ("",))  # noqa: PT017
        assert str(error)  # noqa: PT017


def mutate(encoded: bytes, data: st.DataObject) -> bytes:
    mutant = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutant) - 1))
        mutant[position] = data.draw(st.integers(0, 255))
    return bytes(mutant)
