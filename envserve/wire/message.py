"""Messages to frames and back.

Frame 0: the prefix (little-endian, 44 bytes: magic 4s, version u8, type u8, flags u16,
session u64, boot u64, epoch u32, request u64, attempt u16, entries u16, body length
u32), an entry (block u32, seq u64) per block, then the body. Frames 1 and 2 follow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envserve.errors import RemoteProtocolError
from envserve.wire.constants import (
    MAGIC,
    MAX_ENTRIES,
    MAX_FRAMES,
    MAX_REPORT_BYTES,
    VERSION,
    MessageType,
    body_limit,
)

__all__ = ["PREFIX_BYTES", "Message", "decode", "encode", "peek", "set_attempt"]

#: Bytes that a frame may be made of.
Buffer = bytes | bytearray | memoryview

_PREFIX: Final = struct.Struct("<4sBBHQQIQHHI")
_ENTRY: Final = struct.Struct("<IQ")
_ATTEMPT: Final = struct.Struct("<H")
_ATTEMPT_OFFSET: Final = 36
PREFIX_BYTES: Final = _PREFIX.size

_TYPES: Final = {int(member): member for member in MessageType}
_BODY_LIMITS: Final = {int(member): body_limit(member) for member in MessageType}
_GREETINGS: Final = (MessageType.HELLO, MessageType.WELCOME)


@dataclass(slots=True, kw_only=True)  # frozen takes three times as long to make
class Message:
    """One message, in either direction.

    Attributes:
      type: What it is; a plain int for a type that this version does not know.
      version: Protocol version of the sender.
      flags: See `Flag`.
      session: Number that the client drew for itself; 0 where there is none.
      boot: Number that the server drew when it started; 0 before it is known.
      epoch: Number of the lease; 0 before it is granted.
      request: The client's number for the request; an answer repeats it.
      attempt: How often the request was sent before; an answer repeats the latest.
      entries: Pairs of block and seq that the request is about.
      body: Msgpack of control messages, not yet decoded; or raw rows.
      payload: More raw rows, or the encoded result of a call.
      report: Msgpack of infos, faults and errors.
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


def encode(message: Message) -> list[Buffer]:
    """Returns one to three frames: trailing frames that are empty are left out."""
    entries = message.entries
    prefix = _PREFIX.pack(
        MAGIC,
        message.version,
        message.type,
        message.flags,
        message.session,
        message.boot,
        message.epoch,
        message.request,
        message.attempt,
        len(entries),
        len(message.body),
    )
    head = b"".join([prefix, *(_ENTRY.pack(*entry) for entry in entries), message.body])
    if message.report:
        return [head, message.payload, message.report]
    return [head, message.payload] if message.payload else [head]


def set_attempt(frame: Buffer, attempt: int) -> bytes:
    """Returns frame 0 with another attempt: all that a resent request may change."""
    end = _ATTEMPT_OFFSET + _ATTEMPT.size
    patched = _ATTEMPT.pack(min(attempt, 0xFFFF))
    return bytes(frame[:_ATTEMPT_OFFSET]) + patched + bytes(frame[end:])


def peek(frames: Sequence[Buffer]) -> Message | None:
    """Returns the prefix of what need not be valid beyond it, to answer an error."""
    try:
        return _read_prefix(frames)[0]
    except RemoteProtocolError:
        return None


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
    message, count, body_bytes = _read_prefix(frames)
    if num_frames > 1:
        message.payload = frames[1]
        if num_frames > 2:
            message.report = frames[2]
    kind = message.type
    has_known_form = message.version == VERSION
    # The form of these never changes, so that any two versions can find out.
    if kind in _BODY_LIMITS and (has_known_form or kind in _GREETINGS):
        head = frames[0]
        start = PREFIX_BYTES + count * _ENTRY.size
        _check_sizes(message, len(head), start, count, body_bytes)
        message.body = bytes(head[start:])
        if has_known_form:
            message.entries = tuple(_ENTRY.iter_unpack(head[PREFIX_BYTES:start]))
    return message


def _read_prefix(frames: Sequence[Buffer]) -> tuple[Message, int, int]:
    """Returns what the prefix says; how many entries; how long the body is."""
    if not frames or len(frames[0]) < PREFIX_BYTES:
        got = len(frames[0]) if frames else 0
        raise RemoteProtocolError(
            f"expected a prefix of {PREFIX_BYTES} bytes; got {got}"
        )
    (
        magic, version, type_, flags, session, boot,
        epoch, request, attempt, count, body_bytes,
    ) = _PREFIX.unpack_from(frames[0])  # fmt: skip
    if magic != MAGIC:
        raise RemoteProtocolError(f"expected a message that begins with {MAGIC!r}")
    message = Message(
        type=_TYPES.get(type_, type_),
        version=version,
        flags=flags,
        session=session,
        boot=boot,
        epoch=epoch,
        request=request,
        attempt=attempt,
    )
    return message, count, body_bytes


def _check_sizes(
    message: Message, head_bytes: int, start: int, count: int, body_bytes: int
) -> None:
    """Checks all sizes against limits and frames; the body begins at `start`."""
    if count > MAX_ENTRIES:
        raise RemoteProtocolError(f"expected at most {MAX_ENTRIES} blocks; got {count}")
    limit = _BODY_LIMITS[message.type]
    if body_bytes > limit:
        raise RemoteProtocolError(
            f"expected a {MessageType(message.type).name} body of at most {limit} "
            f"bytes; got {body_bytes}"
        )
    if head_bytes != start + body_bytes:
        raise RemoteProtocolError(
            f"expected a first frame of {start + body_bytes} bytes, as its prefix "
            f"says; got {head_bytes}"
        )
    if len(message.report) > MAX_REPORT_BYTES:
        raise RemoteProtocolError(
            f"expected a report of at most {MAX_REPORT_BYTES} bytes; "
            f"got {len(message.report)}"
        )
