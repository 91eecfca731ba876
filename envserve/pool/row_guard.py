"""Detect that an env has written outside its memory, into the rows of the pool.

Native code can overwrite any part of the slab by mistake. Flags and statuses have few
valid values, and the padding around their arrays is always zero, so any other value
there shows that rows were overwritten. Overwritten observations, rewards and actions
cannot be detected, because any bytes may be valid values of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from envserve.lane import Block
from envserve.slab import Slab, Status, aligned

#: Stands for the padding in a set of blocks.
PADDING: Final = -1


class RowGuard:
    """Finds blocks whose flags or statuses were overwritten.

    Attributes:
      flags: See `Slab.flags`.
      usual: The bytes of `flags` if no episode has ended and all statuses are OK. The
        pool compares them at every step, because this is the cheapest check.
    """

    def __init__(self, slab: Slab, blocks: Sequence[Block]) -> None:
        self.flags = slab.flags
        self.usual = bytes(len(self.flags))
        self._limits = np.zeros(len(self.flags), np.uint8)
        self._owners = np.full(len(self.flags), PADDING)
        num_envs = blocks[-1].stop
        length = aligned(num_envs)  # of each of the three arrays, with its padding
        limits, owners = (
            array[-3 * length :].reshape(3, length)[:, :num_envs]
            for array in (self._limits, self._owners)
        )
        limits[:] = [[1], [1], [Status.PENDING]]
        owners[:] = np.repeat([b.index for b in blocks], [len(b.rows) for b in blocks])

    def overwritten_blocks(self) -> set[int]:
        """Return the blocks with invalid values, and PADDING if the padding has any."""
        found: Any = self._owners[self.flags > self._limits].tolist()
        return set(found)

    def clear_padding(self) -> None:
        """Restore the padding, so that it is not found again."""
        self.flags[self._owners == PADDING] = 0
