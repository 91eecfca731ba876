"""Helpers for scripts that attack a server: core assignment, and goals."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Console

from benchmarks.lab.tables import TABLE_WIDTH, as_table

#: Number of cores for each side, if the machine has enough for all sides.
_CORES: Final = {"server": 4, "control": 4, "client": 2, "attacker": 2}


class Cores:
    """Cores of each side of an attack: server, control, client and attacker."""

    def __init__(self) -> None:
        """Assign this process's cores to the sides, if there are enough."""
        is_linux = hasattr(os, "sched_setaffinity")
        free = iter(sorted(os.sched_getaffinity(0))) if is_linux else iter(())
        dealt = {
            side: set(itertools.islice(free, count)) for side, count in _CORES.items()
        }
        is_enough = all(len(dealt[side]) == count for side, count in _CORES.items())
        self._dealt: Mapping[str, set[int]] = dealt if is_enough else {}

    def __str__(self) -> str:
        if not self._dealt:
            return (
                f"all on the same cores, because there are not {sum(_CORES.values())}"
            )
        return "; ".join(
            f"{side} on cores {cores}" for side, cores in self._dealt.items()
        )

    @contextlib.contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Run this thread, and the processes that it starts, on a side's cores."""
        if not self._dealt:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._dealt[side])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


class Goals:
    """Measured values and their goals.

    Attributes:
      num_missed: Number of goals that are missed.
    """

    def __init__(self) -> None:
        self.num_missed = 0
        self._rows: list[list[str]] = []

    def at_most(self, what: str, figure: float, goal: float) -> None:
        """Record a value whose goal is an upper bound."""
        self._note(what, figure, goal, "<=", figure <= goal)

    def at_least(self, what: str, figure: float, goal: float) -> None:
        """Record a value whose goal is a lower bound."""
        self._note(what, figure, goal, ">=", figure >= goal)

    def _note(
        self, what: str, figure: float, goal: float, sign: str, holds: bool
    ) -> None:
        self.num_missed += not holds
        verdict = "" if holds else "MISSED"
        self._rows.append([what, f"{figure:,.4g}", f"{sign} {goal:,.4g}", verdict])
        print(*self._rows[-1], flush=True)

    def report(self) -> int:
        """Print the table; return the exit code, which is 1 if a goal was missed."""
        columns = ("quantity", "value", "goal", "")
        Console(width=TABLE_WIDTH).print(as_table(columns, self._rows))
        print(f"{self.num_missed} of {len(self._rows)} goals were missed")
        return int(self.num_missed > 0)
