"""Encode rows as bytes, without a description of their layout.

The encoding is a concatenation of fields. Each field contains the rows of all blocks of
the message, in the order in which the message lists the blocks. The fields of a STEP
are the action leaves. Those of a RESULT are reward, terminated, truncated, status and
the observation leaves, followed by the final_observation leaves, which contain only the
rows that are terminated or truncated.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from envserve.errors import LocalProtocolError, RemoteProtocolError
from envserve.lane import Block
from envserve.slab import Array, Rows, Status
from envserve.wire.constants import MAX_INLINE_BYTES
from envserve.wire.message import Buffer

#: The first row of a range, and the row after its last row.
Range = tuple[int, int]

#: Status values that a server may send; clients set all other values themselves.
_WIRE_STATUSES: Final = bytes(
    [Status.OK, Status.ENV_ERROR, Status.WORKER_DIED, Status.TIMEOUT]
)
#: Bytes per row of the fields before the flags (reward), before the status (reward and
#: flags), and before the observation leaves (reward, flags and status).
_FLAGS_OFFSET: Final = 8
_STATUS_OFFSET: Final = 10
_FIXED_FIELDS_BYTES: Final = 11
#: Maximum number of sets of several blocks for which a `RowPart` is cached. A client
#: usually sends one set of blocks per split, or each block separately.
_MAX_PARTS: Final = 64


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges, so that they are copied in one operation."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def split_rows(buffers: Sequence[Buffer]) -> tuple[bytes, Buffer]:
    """Return the bytes for a message's body, and the bytes for a separate frame.

    If the fields are too long for the body, the body contains only the first fields,
    and the separate frame contains the others. If there is only one other field, it is
    sent without a copy.
    """
    if sum(map(len, buffers)) <= MAX_INLINE_BYTES:
        return b"".join(buffers), b""
    bytes_left, count = MAX_INLINE_BYTES, 0
    while len(buffers[count]) <= bytes_left:
        bytes_left -= len(buffers[count])
        count += 1
    first, rest = buffers[:count], buffers[count:]
    return b"".join(first), rest[0] if len(rest) == 1 else b"".join(rest)


class RowCodec:
    """Views of the row arrays as bytes; the client and the server have one each.

    Attributes:
      num_envs: Number of rows.
      flags: terminated and truncated, uint8 `[num_envs, 1]`.
      actions: Action leaves, uint8 `[num_envs, bytes per row]`.
      results: Fields that every row of a RESULT has, uint8 `[num_envs, bytes per row]`.
      finals: Leaves of final_observation, uint8 `[num_envs, bytes per row]`.
    """

    def __init__(self, rows: Rows) -> None:
        """Create views of all arrays.

        Raises:
          LocalProtocolError: The machine is big-endian.
        """
        if sys.byteorder != "little":
            raise LocalProtocolError(
                "big-endian machines are not supported, because rows are sent in "
                "native byte order"
            )
        self.num_envs = len(rows.reward)
        self.flags = [_byte_rows(rows.terminated), _byte_rows(rows.truncated)]
        self.actions = [_byte_rows(array) for array in rows.action]
        self.results = [
            _byte_rows(rows.reward),
            *self.flags,
            _byte_rows(rows.status),
            *(_byte_rows(array) for array in rows.observation),
        ]
        self.finals = [_byte_rows(array) for array in rows.final_observation]

    @property
    def max_result_bytes(self) -> int:
        """Size in bytes of a result of all rows if the episode of each row ends."""
        per_row: int = sum(array.shape[1] for array in (*self.results, *self.finals))
        return self.num_envs * per_row


class RowPart:
    """Encodes and decodes a fixed set of rows, whose byte ranges are computed once.

    Received bytes may be in two pieces, `first` and `rest`: the body and the payload.

    Attributes:
      ranges: First row, and row after the last, of each contiguous range.
      num_result_bytes: Length of a result in which no episode has ended.
    """

    def __init__(self, codec: RowCodec, ranges: Sequence[Range]) -> None:
        self.ranges = ranges
        self._rows: Array = np.concatenate(
            [np.arange(0), *(np.arange(*part) for part in ranges)]
        )
        self._num_rows = len(self._rows)
        self._finals = codec.finals
        self._actions = _views(codec.actions, ranges)
        self._results = _views(codec.results, ranges)
        self._flags = _views(codec.flags, ranges)
        self._action_ends = list(itertools.accumulate(map(len, self._actions)))
        self._result_ends = list(itertools.accumulate(map(len, self._results)))
        starts = [0, *self._result_ends[:-1]]
        slices = map(slice, starts, self._result_ends)
        self._result_slices = list(zip(self._results, slices, strict=True))
        self._no_flags = bytes((_FIXED_FIELDS_BYTES - _FLAGS_OFFSET) * self._num_rows)
        self._action_bytes = sum(map(len, self._actions))
        self.num_result_bytes = sum(map(len, self._results))
        self._final_bytes = sum(array.shape[1] for array in codec.finals)

    def pack_actions(self) -> tuple[bytes, bytes]:
        """Return the body and payload of a STEP message, both as copies of the actions.

        The copies are necessary because a resent request must contain the same bytes as
        the original, even if the rows have changed.
        """
        if self._action_bytes <= MAX_INLINE_BYTES:  # the usual case
            return b"".join(self._actions), b""
        body, payload = split_rows(self._actions)
        return body, bytes(payload)

    def unpack_actions(self, first: Buffer, rest: Buffer = b"") -> None:
        """Write received actions to the rows.

        Raises:
          RemoteProtocolError: The number of bytes is wrong; nothing is written.
        """
        size = len(first) + len(rest)
        if size != self._action_bytes:
            raise RemoteProtocolError(
                f"expected {self._action_bytes} bytes of actions; got {size}"
            )
        if not len(rest):  # shortcut for the usual case
            source, start = memoryview(first), 0
            for target, end in zip(self._actions, self._action_ends, strict=True):
                target[:] = source[start:end]
                start = end
            return
        first, rest = _join_unless_cut_at_field(first, rest, self._action_ends, 0)
        _write(self._actions, self._action_ends, first, rest)

    def pack_results(self) -> tuple[bytes, Buffer]:
        """Return the body and payload of a RESULT message; see `split_rows`.

        Both may be views of the rows, so do not change the rows until the message has
        been sent.
        """
        buffers: Sequence[Buffer] = self._results
        flags = b"".join(self._flags)
        if 1 in flags:
            terminated, truncated = np.frombuffer(flags, np.bool_).reshape(2, -1)
            ended = self._rows[terminated | truncated]
            finals = (final.take(ended, 0).reshape(-1).data for final in self._finals)
            buffers = [*buffers, *finals]
        elif self.num_result_bytes <= MAX_INLINE_BYTES:  # shortcut for the usual case
            return b"".join(buffers), b""
        return split_rows(buffers)

    def unpack_results(self, first: Buffer, rest: Buffer = b"") -> None:
        """Write received results to the rows.

        Raises:
          RemoteProtocolError: The number of bytes, a flag or a status is not valid;
            nothing is written.
        """
        num_rows, min_bytes = self._num_rows, self.num_result_bytes
        size = len(first) + len(rest)
        # Shortcut for the usual case: one piece, all rows valid, and no episode ended.
        flags = first[_FLAGS_OFFSET * num_rows : _FIXED_FIELDS_BYTES * num_rows]
        if size == min_bytes == len(first) and flags == self._no_flags:
            for target, part in self._result_slices:
                target[:] = first[part]
            return
        if size < min_bytes:
            raise RemoteProtocolError(
                f"expected at least {min_bytes} bytes of results; got {size}"
            )
        first, rest = _join_unless_cut_at_field(
            first, rest, self._result_ends, _FIXED_FIELDS_BYTES * num_rows
        )
        flags = bytes(first[_FLAGS_OFFSET * num_rows : _STATUS_OFFSET * num_rows])
        status = bytes(
            first[_STATUS_OFFSET * num_rows : _FIXED_FIELDS_BYTES * num_rows]
        )
        # translate() removes all allowed values.
        unknown = flags.translate(None, b"\0\1"), status.translate(None, _WIRE_STATUSES)
        if num_rows == 0 or any(unknown):
            raise RemoteProtocolError(
                f"expected flags of 0 or 1, and statuses in {[*_WIRE_STATUSES]}; "
                f"the server sent flags {[*{*flags}]} and statuses {[*{*status}]}"
            )
        terminated, truncated = np.frombuffer(flags, np.bool_).reshape(2, num_rows)
        if status.strip(b"\0"):
            is_fault = np.frombuffer(status, np.uint8) != Status.OK
            wrong = np.flatnonzero(is_fault & (terminated | ~truncated))
            if len(wrong):
                row = wrong[0]
                raise RemoteProtocolError(
                    f"expected rows with a fault to be truncated and not terminated; "
                    f"the server sent terminated {terminated[row]:d}, truncated "
                    f"{truncated[row]:d} and status {status[row]} in row {row}"
                )
        rows = self._rows[terminated | truncated]
        expected = min_bytes + len(rows) * self._final_bytes
        if size != expected:
            raise RemoteProtocolError(
                f"expected {expected} bytes of results, with final observations of "
                f"{len(rows)} rows; got {size}"
            )
        _write(self._results, self._result_ends, first, rest)
        if rows.size:
            is_in_first = len(first) > min_bytes
            offset = min_bytes if is_in_first else min_bytes - len(first)
            self._write_finals(rows, first if is_in_first else rest, offset)

    def _write_finals(self, rows: Array, source: Buffer, offset: int) -> None:
        data = np.frombuffer(source, np.uint8) if len(source) else np.empty(0, np.uint8)
        for final in self._finals:
            shape = (len(rows), final.shape[1])
            end = offset + shape[0] * shape[1]
            final[rows] = data[offset:end].reshape(shape)
            offset = end


def _byte_rows(array: Array) -> Array:
    """Return a view of `[num_envs, ...]` as uint8 `[num_envs, bytes per row]`."""
    num_envs = len(array)
    flat = array.reshape(-1).view(np.uint8)
    return flat.reshape(num_envs, flat.size // num_envs)


def _views(arrays: Sequence[Array], ranges: Sequence[Range]) -> list[memoryview]:
    return [
        array[start:stop].reshape(-1).data for array in arrays for start, stop in ranges
    ]


def _join_unless_cut_at_field(
    first: Buffer, rest: Buffer, ends: Sequence[int], min_bytes: int
) -> tuple[memoryview, memoryview]:
    """Return two pieces that are cut at one of `ends`, and not before `min_bytes`.

    If the cut between `first` and `rest` is elsewhere, they are joined, and the second
    piece is empty.
    """
    if not len(first):
        first, rest = rest, b""
    elif len(rest) and not (len(first) >= min_bytes and len(first) in ends):
        first, rest = b"".join((first, rest)), b""
    return memoryview(first), memoryview(rest)


def _write(
    targets: Sequence[memoryview],
    ends: Sequence[int],
    first: memoryview,
    rest: memoryview,
) -> None:
    """Copy two pieces to consecutive targets, which end at the offsets `ends`.

    The pieces are cut at one of these offsets, so no target needs both.
    """
    source, base, offset = first, 0, 0
    for target, end in zip(targets, ends, strict=True):
        if offset == len(first):
            source, base = rest, offset
        target[:] = source[offset - base : end - base]
        offset = end


class BlockParts(dict[tuple[int, ...], RowPart]):
    """Cache that maps tuples of block indices to `RowPart`s.

    A cache helps, because the same sets of blocks are stepped repeatedly. The parts of
    single blocks always stay in the cache.
    """

    def __init__(self, codec: RowCodec, blocks: Sequence[Block]) -> None:
        super().__init__()
        self._codec = codec
        self._blocks = blocks
        self._num_sets = 0  # number of cached sets of several blocks

    def __missing__(self, indexes: tuple[int, ...]) -> RowPart:
        """Create the `RowPart` for a set of blocks that is not cached."""
        blocks = [self._blocks[index] for index in indexes]
        ranges = merge_ranges((block.start, block.stop) for block in blocks)
        if len(indexes) != 1:
            if self._num_sets == _MAX_PARTS:
                for key in [key for key in self if len(key) != 1]:
                    del self[key]
                self._num_sets = 0
            self._num_sets += 1
        part = self[indexes] = RowPart(self._codec, ranges)
        return part
