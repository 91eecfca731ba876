"""What pool and worker say to each other over a socket pair.

Every frame is a header (kind, block, sequence number, payload length) and a payload
in `codec`'s encoding. A step is one header; its rows are in the slab.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from envserve.errors import WorkerError

__all__ = [
    "HEADER",
    "MAX_CALL_BYTES",
    "Frame",
    "FrameReader",
    "Inbox",
    "Kind",
    "pack_frame",
]

#: Kind, block, sequence number, bytes of payload.
HEADER: Final = struct.Struct("<BxHII")
_MAX_PAYLOAD_BYTES: Final = 64 << 20

#: Longest encoding of a call, and of its result.
MAX_CALL_BYTES: Final = 32 << 20


class Kind(enum.IntEnum):
    """Kinds of frames."""

    # Pool to worker.
    BUILD = 1  # what envs to build; answered by READY or FAILED
    SLAB = 2  # carries the slab's descriptor; not answered
    STEP = 3  # of a block; answered by DONE
    RESET = 4  # of rows of a block; answered by DONE
    CALL = 5  # attribute access on an env; answered by DONE
    CLOSE = 6  # close the envs and exit
    REPLAY = 14  # in place of BUILD: apply what a file holds; see `worker.play`
    # Worker to pool.
    BUILT = 7  # one more env is built
    READY = 8  # all are; carries their spaces
    DONE = 9  # the block's rows are written
    FAILED = 10  # traceback; the worker exits
    UNKNOWN_ENV = 11  # message; the worker exits
    BAD_WRAPPER = 15  # message; the worker exits
    # Between launcher and template.
    FORK = 16  # what to import, fork or kill, and what has become of that


_KINDS: Final = {int(kind): kind for kind in Kind}
_NEW: Final = tuple.__new__


class Frame(NamedTuple):
    """A frame that was read."""

    kind: Kind
    block: int
    sequence: int
    payload: bytes


def pack_frame(
    kind: int, block: int = 0, sequence: int = 0, payload: bytes = b""
) -> bytes:
    """Returns the bytes of a frame."""
    return HEADER.pack(kind, block, sequence, len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        """Starts with an empty buffer."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that are complete now.

        Raises:
          WorkerError: The bytes are not frames.
        """
        buffer = self._buffer
        if not buffer and len(data) == HEADER.size:
            code, block, sequence, length = HEADER.unpack(data)
            if length == 0 and code in _KINDS:  # the usual case, without a call
                return [_NEW(Frame, (_KINDS[code], block, sequence, b""))]
        buffer += data
        frames = []
        offset = 0
        while len(buffer) - offset >= HEADER.size:
            code, block, sequence, length = HEADER.unpack_from(buffer, offset)
            kind = _KINDS.get(code)
            if kind is None or length > _MAX_PAYLOAD_BYTES:
                raise WorkerError(
                    f"expected a frame of a known kind below {_MAX_PAYLOAD_BYTES} "
                    f"bytes; got kind {code} of {length} bytes"
                )
            start = offset + HEADER.size
            if len(buffer) < start + length:
                break
            offset = start + length
            frames.append(Frame(kind, block, sequence, bytes(buffer[start:offset])))
        del buffer[:offset]
        return frames


class Inbox:
    """What the pool sends, as a worker reads it.

    Attributes:
      fds: Descriptors that have come.
      spin_seconds: How long to look for a frame, giving way to others, before sleeping.
    """

    def __init__(self, channel: socket.socket) -> None:
        """Takes the worker's side of the socket pair."""
        self.fds: list[int] = []
        self.spin_seconds = 0.0
        self._channel = channel

    def frames(self) -> Iterator[Frame]:
        """Yields frames until the pool closes its end."""
        reader = FrameReader()
        has_slab = False
        while True:
            if has_slab:
                data = self._receive()
            else:
                data, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
                self.fds += fds
                has_slab = bool(fds)
            if not data:
                return
            yield from reader.feed(data)

    def _receive(self) -> bytes:
        give_up_at = time.perf_counter() + self.spin_seconds
        while time.perf_counter() < give_up_at:
            try:
                return self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return self._channel.recv(1 << 16)
