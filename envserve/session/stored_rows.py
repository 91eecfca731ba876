"""Results that nobody waits for yet: kept apart, since rows are the caller's to read.

They are written to the rows when the caller steps the block next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from envserve.lane import Block
from envserve.session.parts import BlockParts
from envserve.slab import Rows, Status, keep_last_observation, write_lost, write_pending
from envserve.wire import Buffer, RowCodec

__all__ = ["StoredRows"]

Array = np.ndarray[Any, Any]

_OK: Final = int(Status.OK)
_LATE: Final = int(Status.LATE)


class StoredRows:
    """Rows like those of the caller, with results in store."""

    def __init__(self, rows: Rows, stored: Rows, blocks: Sequence[Block]) -> None:
        """Takes the caller's rows, and as many to store results in."""
        self.rows = stored
        self._target = rows
        self._parts = BlockParts(RowCodec(stored), blocks)

    def unpack(self, blocks: tuple[int, ...], first: Buffer, rest: Buffer) -> None:
        """Stores rows of a RESULT; raises RemoteProtocolError as `RowPart` does."""
        self._parts[blocks].unpack_results(first, rest)

    def write_late(self, block: Block, but: Collection[int]) -> None:
        """Writes a block's results, as late ones; rows in `but` become pending."""
        part, source, target = _part(block), self.rows, self._target
        kept = self._keep(but)
        self.write_observations(block)
        for final, stored in zip(
            target.final_observation, source.final_observation, strict=True
        ):
            final[part] = stored[part]
        target.reward[part] = source.reward[part]
        target.terminated[part] = source.terminated[part]
        target.truncated[part] = source.truncated[part]
        status = source.status[part]
        target.status[part] = np.where(status == _OK, _LATE, status)
        self._set_pending(but, kept)

    def write_lost(self, block: Block, but: Collection[int]) -> None:
        """Ends a block's episodes, those of `but` excepted, and begins stored ones."""
        part = _part(block)
        kept = self._keep(but)
        keep_last_observation(self._target, part)
        self.write_observations(block)
        write_lost(self._target, part, Status.SERVER_LOST)
        self._set_pending(but, kept)

    def write_observations(self, block: Block) -> None:
        """Writes a block's observations only."""
        part = _part(block)
        for leaf, stored in zip(
            self._target.observation, self.rows.observation, strict=True
        ):
            leaf[part] = stored[part]

    def _keep(self, rows: Collection[int]) -> list[Array]:
        return [leaf[list(rows)] for leaf in self._target.observation] if rows else []

    def _set_pending(self, rows: Collection[int], kept: Sequence[Array]) -> None:
        if not rows:
            return
        for leaf, values in zip(self._target.observation, kept, strict=True):
            leaf[list(rows)] = values
        for row in rows:
            write_pending(self._target, slice(row, row + 1))


def _part(block: Block) -> slice:
    return slice(block.start, block.stop)
