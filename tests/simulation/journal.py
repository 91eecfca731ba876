"""What the envs of a simulation have done, whoever has asked for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from envserve.spaces import codec
from tests.oracle.incarnations import audit
from tests.oracle.journal import RECORD
from tests.oracle.ledger import Ledger

if TYPE_CHECKING:
    from tests.simulation.pool import MemoryPool


class Violation(Exception):
    """Something has happened that never may, whatever fails."""


def check_levels(
    infos: Mapping[int, Mapping[str, Any]], rows: Collection[int], options: bytes
) -> None:
    """Checks that a reset has shown each of these rows its options, and no others."""
    levels = {row: info["level"] for row, info in infos.items()}
    expected = dict.fromkeys(rows, codec.decode(options)["level"]) if options else {}
    if levels != expected:
        raise Violation(f"a reset has shown {levels}; expected {expected}")


class SimulationJournal:
    """What a `LedgerEnv` needs of a journal; and which calls have been asked for.

    Attributes:
      pools: Where each seed is, or was, in use.
    """

    def __init__(self) -> None:
        self.pools: dict[int, MemoryPool] = {}
        self.num_lost = 0
        self._records: list[tuple[int, int, int, int, int]] = []
        self._calls: set[tuple[int, int]] = set()
        self._last_call = self._last_level = 0

    def write(self, seed: int, episode: int, step: int, action: int) -> None:
        self._records.append((seed, episode, step, action, 0))

    def close(self) -> None:
        """Stays open: it has no file, and other envs go on writing."""

    def new_level(self) -> int:
        self._last_level += 1
        return self._last_level

    def new_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def note_call(self, number: int, row: int) -> None:
        if number > self._last_call or (number, row) in self._calls:
            raise Violation(f"call {number} of row {row} was executed twice, or never")
        self._calls.add((number, row))

    def audit(self, ledgers: Iterable[Ledger]) -> None:
        """Compares with what clients have seen, each with a ledger."""
        incarnations = chain.from_iterable(ledger.incarnations() for ledger in ledgers)
        _, wrong = audit(incarnations, np.array(self._records, RECORD))
        if wrong:
            raise Violation("; ".join(wrong[:5]))
