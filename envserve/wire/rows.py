"""Rows to bytes and back, without any description of them on the wire.

Field by field, each the rows of the listed blocks in their order: a STEP holds the
action leaves; a RESULT reward, terminated, truncated, status, the observation leaves,
and final_observation leaves of only those rows that are terminated or truncated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from envserve.errors import LocalProtocolError, RemoteProtocolError
from envserve.slab import Rows, Status
from envserve.wire.message import Buffer

__all__ = ["RowCodec", "merge_ranges"]

Array = np.ndarray[Any, Any]
#: First row, and row after the last.
Range = tuple[int, int]

#: SERVER_LOST is what a client says of rows that no server sent.
_LAST_STATUS: Final = Status.TIMEOUT
#: Bytes per row of reward, terminated, truncated and status.
_FLAGS_OFFSET: Final = 8
_HEAD_BYTES: Final = 11


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Joins ranges that follow each other, so that they are copied at once."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


class RowCodec:
    """Reads from and writes into the rows it was made for; both ends have one."""

    def __init__(self, rows: Rows) -> None:
        """Takes byte views of all arrays, each `[num_envs, bytes per row]`."""
        if sys.byteorder != "little":
            raise LocalProtocolError(
                "expected a little-endian machine: rows travel as they are in memory"
            )
        self._terminated = rows.terminated
        self._truncated = rows.truncated
        self._actions = [_byte_rows(array) for array in rows.action]
        self._results = [
            _byte_rows(array)
            for array in (
                rows.reward,
                rows.terminated,
                rows.truncated,
                rows.status,
                *rows.observation,
            )
        ]
        self._finals = [_byte_rows(array) for array in rows.final_observation]
        self._action_bytes: int = sum(array.shape[1] for array in self._actions)
        self._result_bytes: int = sum(array.shape[1] for array in self._results)
        self._final_bytes: int = sum(array.shape[1] for array in self._finals)

    @property
    def max_result_bytes(self) -> int:
        """Bytes of a result of all rows, every one of which ends its episode."""
        return len(self._terminated) * (self._result_bytes + self._final_bytes)

    def pack_actions(self, ranges: Sequence[Range]) -> bytes:
        """Returns the actions of some rows."""
        return _join(_slices(self._actions, ranges))

    def unpack_actions(self, ranges: Sequence[Range], payload: Buffer) -> None:
        """Writes actions into some rows; raises RemoteProtocolError on their size."""
        expected = _count(ranges) * self._action_bytes
        if len(payload) != expected:
            raise RemoteProtocolError(
                f"expected {expected} bytes of actions; got {len(payload)}"
            )
        _write(_slices(self._actions, ranges), np.frombuffer(payload, np.uint8))

    def pack_results(self, ranges: Sequence[Range]) -> bytes:
        """Returns what envs wrote into some rows."""
        pieces = _slices(self._results, ranges)
        rows = [self._ended_rows(*part) for part in ranges]
        if any(map(len, rows)):
            ended = np.concatenate(rows)
            pieces += [final[ended] for final in self._finals]
        return _join(pieces)

    def _ended_rows(self, start: int, stop: int) -> Array:
        flags = self._terminated[start:stop] | self._truncated[start:stop]
        return start + np.flatnonzero(flags)

    def unpack_results(self, ranges: Sequence[Range], payload: Buffer) -> None:
        """Writes results into some rows.

        Raises:
          RemoteProtocolError: The bytes are not exactly what such rows need; then
            nothing is written.
        """
        count = _count(ranges)
        fixed = count * self._result_bytes
        if len(payload) < fixed:
            raise RemoteProtocolError(
                f"expected at least {fixed} bytes of results; got {len(payload)}"
            )
        data = np.frombuffer(payload, np.uint8)
        flags = data[_FLAGS_OFFSET * count : _HEAD_BYTES * count]
        if (
            count == 0
            or flags[: 2 * count].max() > 1
            or flags[2 * count :].max() > _LAST_STATUS
        ):
            raise RemoteProtocolError(
                f"expected flags of 0 or 1 and a status up to {_LAST_STATUS:d}"
            )
        ended = flags[:count] | flags[count : 2 * count]
        expected = fixed + int(ended.sum()) * self._final_bytes
        if len(payload) != expected:
            raise RemoteProtocolError(
                f"expected {expected} bytes of results, with final observations of "
                f"{int(ended.sum())} rows; got {len(payload)}"
            )
        offset = _write(_slices(self._results, ranges), data)
        if offset < expected:
            rows = np.concatenate([np.arange(*part) for part in ranges])
            self._write_finals(rows[ended.view(np.bool_)], data[offset:])

    def _write_finals(self, rows: Array, data: Array) -> None:
        offset = 0
        for final in self._finals:
            shape = (len(rows), final.shape[1])
            end = offset + shape[0] * shape[1]
            final[rows] = data[offset:end].reshape(shape)
            offset = end


def _byte_rows(array: Array) -> Array:
    """`[num_envs, ...]` -> uint8 `[num_envs, bytes per row]`, of the same memory."""
    num_envs = len(array)
    flat = array.reshape(-1).view(np.uint8)
    return flat.reshape(num_envs, flat.size // num_envs)


def _count(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _slices(arrays: Sequence[Array], ranges: Sequence[Range]) -> list[Array]:
    return [array[start:stop] for array in arrays for start, stop in ranges]


def _join(arrays: Sequence[Array]) -> bytes:
    return b"".join([array.data for array in arrays])


def _write(targets: Sequence[Array], data: Array) -> int:
    """Fills contiguous arrays one after the other; returns where it stopped."""
    offset = 0
    for target in targets:
        end = offset + target.size
        target[...] = data[offset:end].reshape(target.shape)
        offset = end
    return offset
