"""What calls have given, kept for who asks again because the answer was lost."""

from __future__ import annotations

from collections.abc import MutableMapping

from envserve.errors import CallError
from envserve.lane import Outcome

__all__ = ["KeptResults"]


class KeptResults:
    """Bounds what a lease keeps of it: beyond, the oldest goes, which was sent.

    Rows are no matter here: they stay where they are.

    Attributes:
      num_bytes: How long all of it is.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keeps at most so many bytes, or one result."""
        self._max_bytes = max_bytes
        self._kept: dict[int, MutableMapping[int, Outcome]] = {}  # oldest first
        self.num_bytes = 0

    def add(self, outcomes: MutableMapping[int, Outcome], block: int) -> None:
        """Keeps what one block of a request has given, whose outcomes these are.

        Of what goes, the outcome is an error from then on.
        """
        self._kept[block] = outcomes
        self.num_bytes += len(outcomes[block].result)
        while len(self._kept) > 1 and self.num_bytes > self._max_bytes:
            oldest = next(iter(self._kept))
            given = self._kept[oldest]
            length = len(given[oldest].result)
            self.drop(oldest)
            text = f"its answer, of {length} bytes, was lost, and is kept no more"
            error = CallError(f"the call was carried out; {text}")
            given[oldest] = Outcome(oldest, error=error)

    def drop(self, block: int) -> None:
        """Forgets a block's, if there is any: it has a later request."""
        outcomes = self._kept.pop(block, None)
        if outcomes is not None:
            self.num_bytes -= len(outcomes[block].result)
