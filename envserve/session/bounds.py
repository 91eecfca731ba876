"""Whether actions keep to their space, at the price of two looks per leaf.

Which one does not, and why, is for `actions.check_action_rows` to find out.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from envserve.slab import Rows
from envserve.spec import EnvSpec, Leaf

__all__ = ["ActionBounds"]

Array = np.ndarray[Any, Any]

_smallest: Final = np.minimum.reduce
_greatest: Final = np.maximum.reduce


class ActionBounds:
    """The bounds of the actions in some rows."""

    def __init__(self, spec: EnvSpec, rows: Rows) -> None:
        """Takes the arrays to look at, and finite bounds for each."""
        self._leaves = [
            (array, *_finite_bounds(leaf))
            for leaf, array in zip(spec.action_leaves, rows.action, strict=True)
            if array.size
        ]

    def hold(self, start: int, stop: int) -> bool:
        """Tells whether all actions of rows `start` to `stop` are within bounds."""
        for array, low, high in self._leaves:
            part = array[start:stop]
            # Over the rows, if bounds differ by element; NaN comes through both.
            axis = 0 if isinstance(low, np.ndarray) else None
            is_good = (_smallest(part, axis) >= low) & (_greatest(part, axis) <= high)
            if not (is_good if axis is None else is_good.all()):
                return False
        return True


def _finite_bounds(leaf: Leaf) -> tuple[Any, Any]:
    """Returns least and greatest values, as one number each if that is all it takes."""
    low, high, _ = leaf.bounds
    if leaf.dtype.kind == "f":  # whatever its bounds, an action must be finite
        limits = np.finfo(leaf.dtype)
        low, high = np.maximum(low, limits.min), np.minimum(high, limits.max)
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return low.flat[0], high.flat[0]
    return np.broadcast_to(low, leaf.shape), np.broadcast_to(high, leaf.shape)
