"""Splits one direction of a ZMTP 3 connection into messages.

The format is a greeting of 64 bytes, followed by frames. A frame consists of flags u8
(1 more, 2 long, 4 command), a length u8 or (if long) u64 big-endian, and the contents.
A message ends with the first frame without "more". The concatenated pieces equal the
input.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_GREETING_BYTES: Final = 64
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_LONG_LENGTH: Final = struct.Struct(">Q")


class Piece(NamedTuple):
    """A sequence of bytes that is forwarded as a unit.

    Attributes:
      data: The bytes as transmitted.
      is_message: Whether they are a whole message; otherwise they are part of the
      handshake, which must be forwarded exactly once.
    """

    data: bytes
    is_message: bool


class Splitter:
    """Splits a stream of bytes into pieces."""

    def __init__(self) -> None:
        self._greeting_left = _GREETING_BYTES
        self._buffer = bytearray()
        #: Number of buffered bytes in complete frames of an incomplete message.
        self._parsed = 0

    def feed(self, data: bytes) -> list[Piece]:
        pieces = []
        if self._greeting_left:
            # Forward a partial greeting, because the peer replies to its first part.
            greeting = data[: self._greeting_left]
            self._greeting_left -= len(greeting)
            data = data[len(greeting) :]
            pieces.append(Piece(greeting, False))
        self._buffer += data
        while (frame := self._next_frame()) is not None:
            flags, length = frame
            self._parsed += length
            if not flags & _MORE:
                whole = bytes(self._buffer[: self._parsed])
                pieces.append(Piece(whole, not flags & _COMMAND))
                del self._buffer[: self._parsed]
                self._parsed = 0
        return pieces

    def _next_frame(self) -> tuple[int, int] | None:
        """Return flags and length of the next frame, or None if it is incomplete."""
        header = _read_header(self._buffer, self._parsed)
        if header is None:
            return None
        start, length = header
        total = start + length
        if len(self._buffer) < self._parsed + total:
            return None
        return self._buffer[self._parsed], total


def first_frame(message: bytes) -> slice:
    """Return the position of the contents of a message's first frame."""
    header = _read_header(message, 0)
    if header is None:
        raise ValueError("expected a whole message; got less than a frame header")
    start, length = header
    return slice(start, start + length)


def _read_header(data: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """Return the lengths of a frame's header and contents, or None if incomplete."""
    if len(data) < at + 2:
        return None
    if not data[at] & _LONG:
        return 2, data[at + 1]
    end = at + 1 + _LONG_LENGTH.size
    if len(data) < end:
        return None
    return end - at, _LONG_LENGTH.unpack_from(data, at + 1)[0]
