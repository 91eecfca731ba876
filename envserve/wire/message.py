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

__all__ = [
    "PREFIX_BYTES",
    "Message",
    "decode",
    "encode",
    "pack_request",
    "peek",
    "set_attempt",
]

#: Bytes that a frame may be made of.
Buffer = bytes | bytearray | memoryview

_PREFIX: Final = struct.Struct("<4sBBHQQIQHHI")
_ENTRY: Final = struct.Struct("<IQ")
_ENTRY_BYTES: Final = _ENTRY.size
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
    head = b"".join([prefix, *starmap(_ENTRY.pack, entries), message.body])
    if message.report:
        return [head, message.payload, message.report]
    return [head, message.payload] if message.payload else [head]


def pack_request(
    type_: int,
    numbers: tuple[int, int, int],
    request: int,
    entries: Sequence[tuple[int, int]] = (),
    body: bytes = b"",
) -> bytes:
    """Returns frame 0 of a client's request, as `encode` does, for less.

    Args:
      type_: What it asks for.
      numbers: Session, boot and epoch.
      request: Its number.
      entries: Blocks with their seqs.
      body: What stands in the same frame.
    """
    count, size = len(entries), len(body)
    parts = [_PREFIX.pack(MAGIC, VERSION, type_, 0, *numbers, request, 0, count, size)]
    for block, seq in entries:
        parts.append(_ENTRY.pack(block, seq))
    parts.append(body)
    return b"".join(parts)


def set_attempt(frame: Buffer, attempt: int) -> bytes:
    """Returns frame 0 with another attempt: all that a resent request may change."""
    end = _ATTEMPT_OFFSET + _ATTEMPT.size
    patched = _ATTEMPT.pack(min(attempt, 0xFFFF))
    return bytes(frame[:_ATTEMPT_OFFSET]) + patched + bytes(frame[end:])


def peek(frames: Sequence[Buffer]) -> Message | None:
    """Returns the prefix of what need not be valid beyond it, to answer an error."""
    if not frames or len(frames[0]) < PREFIX_BYTES:
        return None
    magic, version, type_, flags, *numbers, _, _ = _PREFIX.unpack_from(frames[0])
    if magic != MAGIC:
        return None
    session, boot, epoch, request, attempt = numbers
    return Message(
        type=_TYPES.get(type_, type_),
        version=version,
        flags=flags,
        session=session,
        boot=boot,
        epoch=epoch,
        request=request,
        attempt=attempt,
    )


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
    if head_bytes < PREFIX_BYTES:
        raise RemoteProtocolError(
            f"expected a prefix of {PREFIX_BYTES} bytes; got {head_bytes}"
        )
    (
        magic, version, type_, flags, session, boot,
        epoch, request, attempt, count, body_bytes,
    ) = _PREFIX.unpack_from(head)  # fmt: skip
    if magic != MAGIC:
        raise RemoteProtocolError(f"expected a message that begins with {MAGIC!r}")
    kind = _TYPES.get(type_, type_)
    entries: tuple[tuple[int, int], ...] = ()
    body = b""
    report = frames[2] if num_frames > 2 else b""
    limit = _BODY_LIMITS.get(type_)
    # The form of greetings never changes, so that any two versions can find out.
    if limit is not None and (version == VERSION or kind in _GREETINGS):
        start = PREFIX_BYTES + count * _ENTRY_BYTES
        if (
            count > MAX_ENTRIES
            or body_bytes > limit
            or head_bytes != start + body_bytes
            or len(report) > MAX_REPORT_BYTES
        ):
            raise _size_error(kind, head_bytes, count, body_bytes, len(report))
        body = bytes(head[start:])
        if version == VERSION:
            entries = tuple(_ENTRY.iter_unpack(head[PREFIX_BYTES:start]))
    return Message(
        type=kind,
        version=version,
        flags=flags,
        session=session,
        boot=boot,
        epoch=epoch,
        request=request,
        attempt=attempt,
        entries=entries,
        body=body,
        payload=frames[1] if num_frames > 1 else b"",
        report=report,
    )


def _size_error(
    kind: int, head_bytes: int, count: int, body_bytes: int, report_bytes: int
) -> RemoteProtocolError:
    """Says which size of a message is over its limit, or does not fit its frame."""
    limit = _BODY_LIMITS[kind]
    start = PREFIX_BYTES + count * _ENTRY_BYTES
    if count > MAX_ENTRIES:
        text = f"expected at most {MAX_ENTRIES} blocks; got {count}"
    elif body_bytes > limit:
        text = (
            f"expected a {MessageType(kind).name} body of at most {limit} bytes; "
            f"got {body_bytes}"
        )
    elif head_bytes != start + body_bytes:
        text = (
            f"expected a first frame of {start + body_bytes} bytes, as its prefix "
            f"says; got {head_bytes}"
        )
    else:
        text = (
            f"expected a report of at most {MAX_REPORT_BYTES} bytes; got {report_bytes}"
        )
    return RemoteProtocolError(text)
