"""Rendered frames of watched envs, in shared memory behind the rows of a pool.

The pool writes which rows to render, at which width, and until when. Workers render
these rows between operations and write each frame to a slot. If no row is watched, the
only cost is that each operation reads a single number (`watched_until`).

There are no locks. A slot contains one encoded `RenderedFrame` and its checksum, so the
pool ignores a frame that is overwritten while it is read, or that an env has corrupted.
If all slots are in use, a newly watched row takes the slot of the row that was
requested least recently.
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

#: Maximum number of rows of a pool that can be watched at the same time.
MAX_WATCHED: Final = 256
_SLOT_BYTES: Final = 56 << 10
#: Header of a slot: serial number, length and checksum of the encoded frame that
#: follows.
_HEAD: Final = struct.Struct("<qII")


class FrameBoard:
    """The watched rows and their latest frames.

    Attributes:
      watched_until: Array whose first element is the time (`time.monotonic_ns`) at
        which the last watch ends; 0 if no row is watched.
      watched: For each slot, the row, the end of the watch (`time.monotonic_ns`) and
        the width in pixels.
      num_render_crashes: For each worker, the number of its processes that have exited
        during `render` since its last frame. A process that is rendering is counted,
        too.
    """

    def __init__(self, num_envs: int, num_workers: int, memory: Any) -> None:
        """Map the board onto memory of at least `board_nbytes` bytes."""
        arrays = map_arrays(_layout(num_envs, num_workers), memory)
        until, crashes, self.watched, self._slots = arrays
        self.watched_until, self.num_render_crashes = until.data, crashes.data
        self._num_envs = num_envs
        # Maps watched rows to slots, the least recently requested row first; used only
        # in the pool.
        self._slots_by_row: dict[int, int] = {}

    def watch(self, rows: Sequence[int], width: int, until: int) -> None:
        """Make workers render rows, with a width in pixels.

        The watch ends at `until`, a value of `time.monotonic_ns()`.
        """
        slots, watched = self._slots_by_row, self.watched
        for row in rows:
            if row >= self._num_envs:
                continue
            slot = slots.pop(row, len(slots))
            if slot == len(watched):
                slot = slots.pop(next(iter(slots)))
            slots[row] = slot  # now the most recently requested slot
            watched[slot] = row, until, width
        self.watched_until[0] = until

    def write(self, slot: int, frame: RenderedFrame) -> None:
        """Write a frame to a slot; called by the row's worker."""
        data = msgspec.msgpack.encode(frame)
        head = _HEAD.pack(frame.serial, len(data), zlib.crc32(data))
        self._slots[slot].data[: _HEAD.size + len(data)] = head + data

    def latest(self, row: int, known_serial: int = 0) -> RenderedFrame | None:
        """Return the latest frame of a row.

        Return None if there is no valid frame, or its serial number is `known_serial`.
        """
        slot = self._slots_by_row.get(row)
        if slot is None:
            return None
        memory = self._slots[slot].data
        serial, size, checksum = _HEAD.unpack_from(memory)
        data = bytes(memory[_HEAD.size : _HEAD.size + size])
        if serial == known_serial or zlib.crc32(data) != checksum:
            return None
        try:
            frame = msgspec.msgpack.decode(data, type=RenderedFrame)
        except ValueError:  # env code has written to the slot
            return None
        return frame if frame.row == row else None


def board_nbytes(num_envs: int, num_workers: int) -> int:
    """Return the size of a board in bytes; unused bytes take no physical memory."""
    return arrays_nbytes(_layout(num_envs, num_workers))


def _layout(num_envs: int, num_workers: int) -> Layout:
    num_slots = min(num_envs, MAX_WATCHED)
    shapes = [(8,), (num_workers,), (num_slots, 3)]
    slots = (num_slots, _SLOT_BYTES), np.dtype(np.uint8)
    return [*((shape, np.dtype(np.int64)) for shape in shapes), slots]
