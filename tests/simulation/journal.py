"""A record of everything that the envs of a simulation did, for all clients."""

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
    """An invariant that must hold under all faults was violated."""


def check_levels(
    infos: Mapping[int, Mapping[str, Any]], rows: Collection[int], options: bytes
) -> None:
    """Verify that a reset passed its options to exactly these rows."""
    levels = {row: info["level"] for row, info in infos.items()}
    expected = dict.fromkeys(rows, codec.decode(options)["level"]) if options else {}
    if levels != expected:
        raise Violation(f"expected reset options {expected} by row; got {levels}")


class SimulationJournal:
    """The journal of all `LedgerEnv`s of a simulation, with their calls.

    Attributes:
      pools: For each seed, the pool in which it is or was used.
      num_lost: Number of lost episodes.
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
        """Do nothing: the journal has no file, and other envs still write to it."""

    def new_level(self) -> int:
        self._last_level += 1
        return self._last_level

    def new_call(self) -> int:
        self._last_call += 1
        return self._last_call

    def record_call(self, number: int, row: int) -> None:
        if number > self._last_call or (number, row) in self._calls:
            raise Violation(f"call {number} of row {row} was repeated or never sent")
        self._calls.add((number, row))

    def audit(self, ledgers: Iterable[Ledger]) -> None:
        """Compare the journal with the results that clients received."""
        incarnations = chain.from_iterable(ledger.incarnations() for ledger in ledgers)
        _, wrong = audit(incarnations, np.array(self._records, RECORD))
        if wrong:
            raise Violation("; ".join(wrong[:5]))
