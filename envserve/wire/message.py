"""Messages to frames and back.

Frame 0: the prefix (little-endian, 44 bytes: magic 4s, version u8, type u8, flags u16,
session u64, boot u64, epoch u32, request u64, attempt u16, entries u16, body length
u32), an entry (block u32, seq u64) per block, then the body. Frames 1 and 2 follow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final

from envserve.errors import RemoteProtocolError
from envserve.wire.constants import (
    BODY_LIMITS,
    MAGIC,
    MAX_ENTRIES,
    MAX_FRAMES,
    MAX_REPORT_BYTES,
    VERSION,
    MessageType,
)

__all__ = [
    "Buffer",
    "Message",
    "Peer",
    "decode",
    "encode",
    "pack",
    "peek",
    "place_of",
    "set_attempt",
]

#: Bytes that a frame may be made of.
Buffer = bytes | bytearray | memoryview
#: Who a message is from: the user, a str, stands last; before it the way back.
Peer = tuple[Any, ...]

_PREFIX: Final = struct.Struct("<4sBBHQQIQHHI")
_ENTRY: Final = struct.Struct("<IQ")
_ENTRY_BYTES: Final = _ENTRY.size
_ATTEMPT: Final = struct.Struct("<H")
_ATTEMPT_OFFSET: Final = 36
_PREFIX_BYTES: Final = _PREFIX.size

_TYPES: Final = {int(member): member for member in MessageType}
_TIMELESS: Final = (MessageType.HELLO, MessageType.WELCOME, MessageType.ERROR)


@dataclass(slots=True)  # frozen takes three times as long to make
class Message:
    """One message, in either direction.

    Attributes:
      type: What it is; a plain int for a type that this version does not know.
      version: Protocol version of the sender.
      flags: Bits, none of which means anything yet.
      session: Number that the client drew for itself; 0 where there is none.
      boot: Number that the server drew when it started; 0 before it is known.
      epoch: Number of the lease; 0 before it is granted.
      request: The client's number for the request; an answer repeats it.
      attempt: How often the request was sent before; an answer repeats the latest.
      entries: Pairs of block and seq that the request is about.
      body: Msgpack of control messages, not yet decoded; or raw rows.
      payload: More raw rows, or the encoded result of a call.
      report: Msgpack of infos, faults and errors.
      peer: Who it came from, for a server; not on the wire.
    """

    type: MessageType | int
    version: int = VERSION
    flags: int = 0
    session: int = 0
    boot: int = 0
    epoch: int = 0
    request: int = 0
    attempt: int = 0
    entries: tuple[tuple[int, int], ...] = ()
    body: bytes = b""
    payload: Buffer = b""
    report: Buffer = b""
    peer: Peer = ("",)


def pack(
    type_: int,
    numbers: tuple[int, int, int],
    request: int,
    entries: Sequence[tuple[int, int]] = (),
    body: bytes = b"",
    payload: Buffer = b"",
    report: Buffer = b"",
    *,
    version: int = VERSION,
    flags: int = 0,
    attempt: int = 0,
) -> list[Buffer]:
    """Returns the frames of a message, see `Message`; none that is empty at the end.

    The numbers are session, boot and epoch. The body stands in frame 0; payload and
    report are frames 1 and 2.
    """
    count, size = len(entries), len(body)
    prefix = _PREFIX.pack(
        MAGIC, version, type_, flags, *numbers, request, attempt, count, size
    )
    head = b"".join([prefix, *starmap(_ENTRY.pack, entries), body])
    if report:
        return [head, payload, report]
    return [head, payload] if payload else [head]


def encode(message: Message) -> list[Buffer]:
    """Returns the frames of a message."""
    return pack(
        message.type,
        (message.session, message.boot, message.epoch),
        message.request,
        message.entries,
        message.body,
        message.payload,
        message.report,
        version=message.version,
        flags=message.flags,
        attempt=message.attempt,
    )


def set_attempt(frame: Buffer, attempt: int) -> bytes:
    """Returns frame 0 with another attempt: all that a resent request may change."""
    end = _ATTEMPT_OFFSET + _ATTEMPT.size
    patched = _ATTEMPT.pack(min(attempt, 0xFFFF))
    return bytes(frame[:_ATTEMPT_OFFSET]) + patched + bytes(frame[end:])


def place_of(frame: Buffer) -> tuple[bytes, bytes]:
    """Returns what tells whose a message is, and about which block first."""
    return bytes(frame[8:16]), bytes(frame[_PREFIX_BYTES : _PREFIX_BYTES + 4])


def peek(frames: Sequence[Buffer]) -> Message | None:
    """Returns the prefix of what need not be valid beyond it, to answer an error."""
    if not frames or len(frames[0]) < _PREFIX_BYTES:
        return None
    magic, version, type_, *numbers, _, _ = _PREFIX.unpack_from(frames[0])
    if magic != MAGIC:
        return None
    return Message(_TYPES.get(type_, type_), version, *numbers)


def decode(frames: Sequence[Buffer]) -> Message:
    """Decodes the frames of a peer that is not trusted.

    A message of an unknown type or version comes back without entries and body, whose
    form cannot be known.

    Raises:
      RemoteProtocolError: The frames are not a message.
    """
    num_frames = len(frames)
    if not 1 <= num_frames <= MAX_FRAMES:
        raise RemoteProtocolError(
            f"expected 1 to {MAX_FRAMES} frames; got {num_frames}"
        )
    head = frames[0]
    head_bytes = len(head)
    if head_bytes < _PREFIX_BYTES:
        raise RemoteProtocolError(
            f"expected a prefix of {_PREFIX_BYTES} bytes; got {head_bytes}"
        )
    magic, version, type_, *numbers, count, body_bytes = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise RemoteProtocolError(f"expected a message that begins with {MAGIC!r}")
    message = Message(_TYPES.get(type_, type_), version, *numbers)
    if num_frames > 1:
        message.payload = frames[1]
    if num_frames > 2:
        message.report = frames[2]
    limit = BODY_LIMITS.get(type_)
    # The form of these never changes, so that any two versions can find out.
    if limit is not None and (version == VERSION or message.type in _TIMELESS):
        start = _PREFIX_BYTES + count * _ENTRY_BYTES
        report_bytes = len(message.report)
        if (
            count > MAX_ENTRIES
            or body_bytes > limit
            or head_bytes != start + body_bytes
            or report_bytes > MAX_REPORT_BYTES
        ):
            raise RemoteProtocolError(
                f"{MessageType(type_).name}: expected at most {MAX_ENTRIES} blocks, a "
                f"body of at most {limit} bytes that ends with its frame, and a report "
                f"of at most {MAX_REPORT_BYTES}; got {count} blocks, a body of "
                f"{body_bytes} in a frame of {head_bytes}, a report of {report_bytes}"
            )
        message.body = bytes(head[start:])
        if version == VERSION:
            message.entries = tuple(_ENTRY.iter_unpack(head[_PREFIX_BYTES:start]))
    return message
