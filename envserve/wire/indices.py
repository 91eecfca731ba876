"""Sets of rows or blocks in a report: short as numbers, long as a bitmap.

A bitmap of all 65,536 rows takes 8 KiB, so a set has a bound however it is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from envserve.errors import RemoteProtocolError

__all__ = ["pack_indices", "unpack_indices"]

#: Longest set that goes as numbers.
_MAX_LISTED: Final = 64


def pack_indices(indices: Sequence[int]) -> list[int] | bytes:
    """Returns an array of numbers, or a bitmap: bit i % 8 of byte i // 8 is index i."""
    if len(indices) <= _MAX_LISTED:
        return list(indices)
    bits = np.zeros(max(indices) + 1, np.uint8)
    bits[list(indices)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_indices(value: Any, limit: int, where: str) -> list[int]:
    """Returns indices in [0, limit); raises RemoteProtocolError for anything else."""
    if isinstance(value, bytes) and len(value) <= limit // 8:
        bits = np.unpackbits(np.frombuffer(value, np.uint8), bitorder="little")
        return [int(index) for index in np.flatnonzero(bits)]
    if isinstance(value, list) and all(
        type(index) is int and 0 <= index < limit for index in value
    ):
        return value
    raise RemoteProtocolError(
        f"{where}: expected an array of ints below {limit}, or a bitmap of them"
    )
