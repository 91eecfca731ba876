"""Encode messages as frames, and decode them.

Frame 0 consists of the prefix (little-endian, 44 bytes: magic 4s, version u8, type u8,
flags u16, session u64, boot u64, epoch u32, request u64, attempt u16, entries u16, body
length u32), an entry (block u32, seq u64) for each block, and the body. Frames 1 and 2
are the payload and the report.
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

#: Content of a frame.
Buffer = bytes | bytearray | memoryview
#: Sender of a message: the parts of its return address, followed by its user (str).
Peer = tuple[Any, ...]

_PREFIX: Final = struct.Struct("<4sBBHQQIQHHI")
_ENTRY: Final = struct.Struct("<IQ")
_ENTRY_BYTES: Final = _ENTRY.size
_ATTEMPT: Final = struct.Struct("<H")
_ATTEMPT_OFFSET: Final = 36
_PREFIX_BYTES: Final = _PREFIX.size
_TYPE_OFFSET: Final = 5
_REQUEST: Final = slice(28, 36)
_SIZE: Final = struct.Struct("<I")
_SIZE_OFFSET: Final = 40

_TYPES: Final = {int(member): member for member in MessageType}
_STABLE_TYPES: Final = (MessageType.HELLO, MessageType.WELCOME, MessageType.ERROR)


@dataclass(slots=True)  # frozen=True would make creation three times as slow
class Message:
    """A message in either direction.

    Attributes:
      type: Type of the message; a plain int if the type is unknown to this version.
      version: Protocol version of the message.
      flags: Reserved bits.
      session: Random number drawn by the client; 0 outside a session.
      boot: Random number drawn by the server at its start; 0 if it is not known yet.
      epoch: Number of the lease; 0 before it is granted.
      request: The client's number for the request; a reply repeats it.
      attempt: Number of times the request was sent before; a reply repeats that of
        the latest copy of the request.
      entries: Pairs (block, seq) that the message concerns.
      body: Encoded msgpack in control messages, raw rows in STEP and RESULT.
      payload: More raw rows, or the encoded result of a call.
      report: Encoded infos, faults and errors.
      peer: Sender, set by a server when it receives the message; not sent.
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
    """Return the frames of a message, without empty frames at the end.

    Args:
      type_: Type of the message.
      numbers: The session, boot and epoch numbers; see `Message`.
      request: Number of the request.
      entries: Pairs (block, seq).
      body: End of frame 0.
      payload: Frame 1.
      report: Frame 2.
      version: Protocol version.
      flags: Reserved bits.
      attempt: Number of times the request was sent before.
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
    """Return the frames of a message."""
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
    """Return a copy of frame 0 with another attempt number, for a resend."""
    end = _ATTEMPT_OFFSET + _ATTEMPT.size
    patched = _ATTEMPT.pack(min(attempt, 0xFFFF))
    return bytes(frame[:_ATTEMPT_OFFSET]) + patched + bytes(frame[end:])


def result_head(frame: Buffer, num_entries: int, num_body_bytes: int) -> bytes:
    """Return the beginning of the RESULT for a request, up to the RESULT's body.

    `frame` is frame 0 of the request, which has the same entries.
    """
    head = bytearray(frame[: _PREFIX_BYTES + num_entries * _ENTRY_BYTES])
    head[_TYPE_OFFSET] = MessageType.RESULT
    _SIZE.pack_into(head, _SIZE_OFFSET, num_body_bytes)
    return bytes(head)


def request_number(frame: Buffer) -> int:
    """Return the request number of a message; arbitrary if the frame is malformed."""
    return int.from_bytes(frame[_REQUEST], "little")


def session_and_block(frame: Buffer) -> tuple[bytes, bytes]:
    """Return the encoded session number and first block number of a message.

    For flow control, these two numbers and the user identify the destination of a
    reply.
    """
    return bytes(frame[8:16]), bytes(frame[_PREFIX_BYTES : _PREFIX_BYTES + 4])


def peek(frames: Sequence[Buffer]) -> Message | None:
    """Decode only the prefix of a message, so that a malformed one can be answered.

    Return None if the frames do not begin with a valid prefix.
    """
    if not frames or len(frames[0]) < _PREFIX_BYTES:
        return None
    magic, version, type_, *numbers, _, _ = _PREFIX.unpack_from(frames[0])
    if magic != MAGIC:
        return None
    return Message(_TYPES.get(type_, type_), version, *numbers)


def decode(frames: Sequence[Buffer]) -> Message:
    """Decode frames from an untrusted peer.

    A message of an unknown type or version is returned without entries and body,
    because their format is unknown.

    Raises:
      RemoteProtocolError: The frames are not a valid message.
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
        raise RemoteProtocolError(
            f"expected a message that begins with {MAGIC!r}; got {bytes(magic)!r}"
        )
    message = Message(_TYPES.get(type_, type_), version, *numbers)
    if num_frames > 1:
        message.payload = frames[1]
    if num_frames > 2:
        message.report = frames[2]
    limit = BODY_LIMITS.get(type_)
    # These types have the same format in all versions, so that peers of any two
    # versions can exchange their version ranges.
    if limit is not None and (version == VERSION or message.type in _STABLE_TYPES):
        start = _PREFIX_BYTES + count * _ENTRY_BYTES
        report_bytes = len(message.report)
        if (
            count > MAX_ENTRIES
            or body_bytes > limit
            or head_bytes != start + body_bytes
            or report_bytes > MAX_REPORT_BYTES
        ):
            problem = (
                f"frame 0 of {start + body_bytes} bytes, according to its prefix; got "
                f"{head_bytes}"
            )
            for number, maximum, unit in (
                (count, MAX_ENTRIES, "blocks"),
                (body_bytes, limit, "bytes of body"),
                (report_bytes, MAX_REPORT_BYTES, "bytes of report"),
            ):
                if number > maximum:
                    problem = f"at most {maximum} {unit}; got {number}"
                    break
            raise RemoteProtocolError(f"{MessageType(type_).name}: expected {problem}")
        message.body = bytes(head[start:])
        if version == VERSION:
            message.entries = tuple(_ENTRY.iter_unpack(head[_PREFIX_BYTES:start]))
    return message
