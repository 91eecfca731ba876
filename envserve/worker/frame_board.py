"""Pictures of envs that somebody looks at, in shared memory behind a pool's rows.

Who looks writes which rows, how large and until when. Workers read one number when
nobody does. A row's slot holds one encoded `RenderedFrame` and its checksum: what is
written over while it is read, or by code of an env, is no picture. Slots are few; the
row that was wanted least of late gives its own up.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from envserve.lane import RenderedFrame
from envserve.slab import Layout, arrays_nbytes, map_arrays

__all__ = [
    "MAX_WATCHED",
    "FrameBoard",
    "board_nbytes",
]

#: Rows of a pool that can be watched at once.
MAX_WATCHED: Final = 256
_SLOT_BYTES: Final = 56 << 10
#: Serial, length and checksum of what follows.
_HEAD: Final = struct.Struct("<qII")


class FrameBoard:
    """Who is watched, and the latest pictures. Instants are of `time.monotonic_ns`.

    Attributes:
      until: One number: when nobody looks any more; 0 if nobody does.
      wanted: For each slot the row, until when it is wanted, and how wide.
      ended: For each worker how many of its processes have ended in a render, since
        there was a picture; the present one is counted while it renders.
    """

    def __init__(self, num_envs: int, num_workers: int, memory: Any) -> None:
        """Lays itself over memory of at least `board_nbytes` bytes."""
        arrays = map_arrays(_layout(num_envs, num_workers), memory)
        until, ended, self.wanted, self._slots = arrays
        self.until, self.ended = until.data, ended.data
        self._num_envs = num_envs
        self._slot_of: dict[int, int] = {}  # of who looks; by row, the latest last

    def watch(self, rows: Sequence[int], width: int, until: int) -> None:
        """Has workers show some rows, so many pixels across, until an instant."""
        slots, wanted = self._slot_of, self.wanted
        for row in rows:
            if row >= self._num_envs:
                continue
            slot = slots.pop(row, len(slots))
            if slot == len(wanted):
                slot = slots.pop(next(iter(slots)))
            slots[row] = slot  # behind those that were wanted before
            wanted[slot] = row, until, width
        self.until[0] = until

    def write(self, slot: int, picture: RenderedFrame) -> None:
        """Puts a picture into a slot; for the row's worker."""
        data = msgspec.msgpack.encode(picture)
        head = _HEAD.pack(picture.serial, len(data), zlib.crc32(data))
        self._slots[slot].data[: _HEAD.size + len(data)] = head + data

    def latest(self, row: int, known: int = 0) -> RenderedFrame | None:
        """Returns the latest picture of a row, unless its serial is known."""
        slot = self._slot_of.get(row)
        if slot is None:
            return None
        memory = self._slots[slot].data
        serial, size, checksum = _HEAD.unpack_from(memory)
        data = bytes(memory[_HEAD.size : _HEAD.size + size])
        if serial == known or zlib.crc32(data) != checksum:
            return None
        try:
            picture = msgspec.msgpack.decode(data, type=RenderedFrame)
        except ValueError:  # nobody but the env's code writes that
            return None
        return picture if picture.row == row else None


def board_nbytes(num_envs: int, num_workers: int) -> int:
    """Returns how many bytes a board needs; memory is taken once it is used."""
    return arrays_nbytes(_layout(num_envs, num_workers))


def _layout(num_envs: int, num_workers: int) -> Layout:
    num_slots = min(num_envs, MAX_WATCHED)
    shapes = [(8,), (num_workers,), (num_slots, 3)]
    slots = (num_slots, _SLOT_BYTES), np.dtype(np.uint8)
    return [*((shape, np.dtype(np.int64)) for shape in shapes), slots]
