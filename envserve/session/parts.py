"""Sets of blocks that are stepped together: their rows, found out once for each set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from envserve.lane import Block
from envserve.wire import RowCodec, RowPart, merge_ranges

__all__ = ["BlockParts"]

#: Any set may be asked for; mostly it is one per split.
_MAX_PARTS: Final = 64


class BlockParts(dict[tuple[int, ...], RowPart]):
    """The rows of blocks, by the indexes of the blocks in their order."""

    def __init__(self, codec: RowCodec, blocks: Sequence[Block]) -> None:
        """Starts empty."""
        super().__init__()
        self._codec = codec
        self._blocks = blocks

    def __missing__(self, indexes: tuple[int, ...]) -> RowPart:
        """Prepares the rows of blocks that were not asked for lately."""
        blocks = [self._blocks[index] for index in indexes]
        part = self._codec.part(
            merge_ranges((block.start, block.stop) for block in blocks)
        )
        if len(self) == _MAX_PARTS:
            self.clear()
        self[indexes] = part
        return part
