"""Messages to frames and back.

Frame 0: the prefix (little-endian, 44 bytes: magic 4s, version u8, type u8, flags u16,
session u64, boot u64, epoch u32, request u64, attempt u16, entries u16, body length
u32), an entry (block u32, seq u64) per block, then the body. Frames 1 and 2 follow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_BODY_LIMITS: Final = {member: body_limit(member) for member in MessageType}


@dataclass(frozen=True, slots=True, kw_only=True)
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
      body: Msgpack of control messages, not yet decoded.
      payload: Raw rows, or the encoded result of a call.
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
    head = _PREFIX.pack(
        MAGIC,
        message.version,
        message.type,
        message.flags,
        message.session,
        message.boot,
        message.epoch,
        message.request,
        message.attempt,
        len(message.entries),
        len(message.body),
    )
    for entry in message.entries:
        head += _ENTRY.pack(*entry)
    head += message.body
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
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise RemoteProtocolError(
            f"expected 1 to {MAX_FRAMES} frames; got {len(frames)}"
        )
    head = frames[0]
    prefix, count, body_bytes = _read_prefix(frames)
    entries: tuple[tuple[int, int], ...] = ()
    body = b""
    if isinstance(prefix.type, MessageType):
        has_known_form = prefix.version == VERSION
        # The form of these never changes, so that any two versions can find out.
        is_greeting = prefix.type in (MessageType.HELLO, MessageType.WELCOME)
        if has_known_form or is_greeting:
            start = _check_sizes(frames, prefix.type, count, body_bytes)
            body = bytes(head[start:])
        if has_known_form:
            entries = tuple(_ENTRY.iter_unpack(head[PREFIX_BYTES:start]))
    return replace(
        prefix,
        entries=entries,
        body=body,
        payload=frames[1] if len(frames) > 1 else b"",
        report=frames[2] if len(frames) > 2 else b"",
    )


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
    frames: Sequence[Buffer], message_type: MessageType, count: int, body_bytes: int
) -> int:
    """Checks all sizes against limits and frames; returns where the body starts."""
    if count > MAX_ENTRIES:
        raise RemoteProtocolError(f"expected at most {MAX_ENTRIES} blocks; got {count}")
    limit = _BODY_LIMITS[message_type]
    if body_bytes > limit:
        raise RemoteProtocolError(
            f"expected a {message_type.name} body of at most {limit} bytes; "
            f"got {body_bytes}"
        )
    start = PREFIX_BYTES + count * _ENTRY.size
    if len(frames[0]) != start + body_bytes:
        raise RemoteProtocolError(
            f"expected a first frame of {start + body_bytes} bytes, as its prefix "
            f"says; got {len(frames[0])}"
        )
    if len(frames) > 2 and len(frames[2]) > MAX_REPORT_BYTES:
        raise RemoteProtocolError(
            f"expected a report of at most {MAX_REPORT_BYTES} bytes; "
            f"got {len(frames[2])}"
        )
    return start
