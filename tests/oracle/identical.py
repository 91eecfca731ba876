"""Bitwise comparison of values, including their types."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_identical(ours: Any, theirs: Any) -> None:
    """Assert that two values, and all values inside them, have equal types and bits."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_identical(ours[key], value)
        return
    if isinstance(theirs, np.ndarray | np.generic):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (ours, theirs)
        if theirs.dtype != object:
            assert ours.tobytes() == theirs.tobytes(), (ours, theirs)
            return
        ours, theirs = [*ours.flat], [*theirs.flat]
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_identical(one, other)
    else:
        assert ours == theirs
