"""What pool and worker say to each other over a socket pair.

Every frame is a header (kind, block, sequence number, payload length) and a payload
in `codec`'s encoding. A step is one header; its rows are in the slab.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from envserve.errors import WorkerError

__all__ = ["MAX_CALL_BYTES", "Frame", "FrameReader", "Kind", "pack_frame"]

_HEADER: Final = struct.Struct("<BxHII")
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
    REPLAY = 14  # in place of BUILD: apply what a file holds; see replay_worker
    PREPARE = 12  # reset a block's envs, but not into its rows yet; answered by DONE
    PUBLISH = 13  # write what PREPARE has brought to the rows; answered by DONE
    # Worker to pool.
    BUILT = 7  # one more env is built
    READY = 8  # all are; carries their spaces
    DONE = 9  # the block's rows are written
    FAILED = 10  # traceback; the worker exits
    UNKNOWN_ENV = 11  # message; the worker exits
    BAD_WRAPPER = 15  # message; the worker exits


_KINDS: Final = {int(kind): kind for kind in Kind}


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
    return _HEADER.pack(kind, block, sequence, len(payload)) + payload


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
        if not buffer and len(data) == _HEADER.size:
            code, block, sequence, length = _HEADER.unpack(data)
            if length == 0 and code in _KINDS:  # the usual case
                return [Frame(_KINDS[code], block, sequence, b"")]
        buffer += data
        frames = []
        offset = 0
        while len(buffer) - offset >= _HEADER.size:
            code, block, sequence, length = _HEADER.unpack_from(buffer, offset)
            kind = _KINDS.get(code)
            if kind is None or length > _MAX_PAYLOAD_BYTES:
                raise WorkerError(
                    f"expected a frame of a known kind below {_MAX_PAYLOAD_BYTES} "
                    f"bytes; got kind {code} of {length} bytes"
                )
            start = offset + _HEADER.size
            if len(buffer) < start + length:
                break
            offset = start + length
            frames.append(Frame(kind, block, sequence, bytes(buffer[start:offset])))
        del buffer[:offset]
        return frames
