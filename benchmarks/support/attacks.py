"""Helpers for scripts that attack a server: processes and their cores, and goals."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console

from benchmarks.support.tables import TABLE_WIDTH, as_table

#: Number of cores that each side gets, if the machine has enough for all sides.
_CORES: Final = {"server": 4, "control": 4, "client": 2, "attacker": 2}


class Cores:
    """CPU cores of each side: the server, control, client and attacker.

    If there are too few cores, all processes share all cores.
    """

    def __init__(self) -> None:
        is_linux = hasattr(os, "sched_setaffinity")
        free = iter(sorted(os.sched_getaffinity(0))) if is_linux else iter(())
        assigned = {
            side: set(itertools.islice(free, count)) for side, count in _CORES.items()
        }
        are_enough = all(len(assigned[side]) == count for side, count in _CORES.items())
        self._assigned: Mapping[str, set[int]] = assigned if are_enough else {}

    def __str__(self) -> str:
        if not self._assigned:
            return (
                "all processes on the same cores, because there are fewer than "
                f"{sum(_CORES.values())}"
            )
        return "; ".join(
            f"{side} on cores {cores}" for side, cores in self._assigned.items()
        )

    @contextlib.contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Use a side's cores for this thread, and for processes that it starts."""
        if not self._assigned:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._assigned[side])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @contextlib.contextmanager
    def attack(self, target: Callable[..., None], *args: Any) -> Iterator[None]:
        """Call `target` in an attacker's process until the `with` block ends."""
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=target, args=args)
        with self.of("attacker"):
            process.start()
        try:
            yield
            assert process.is_alive(), "expected the attacker to run; it has exited"
        finally:
            process.kill()
            process.join()


class Goals:
    """Measured values and their goals.

    Attributes:
      num_missed: Number of values that miss their goal.
    """

    def __init__(self) -> None:
        self.num_missed = 0
        self._rows: list[list[str]] = []

    def at_most(self, name: str, value: float, goal: float) -> None:
        """Record a value whose goal is an upper bound."""
        self._record(name, value, goal, "<=", value <= goal)

    def at_least(self, name: str, value: float, goal: float) -> None:
        """Record a value whose goal is a lower bound."""
        self._record(name, value, goal, ">=", value >= goal)

    def _record(
        self, name: str, value: float, goal: float, sign: str, is_met: bool
    ) -> None:
        self.num_missed += not is_met
        verdict = "" if is_met else "MISSED"
        self._rows.append([name, f"{value:,.4g}", f"{sign} {goal:,.4g}", verdict])
        print(*self._rows[-1], flush=True)

    def report(self) -> int:
        """Print the table; return the exit code, which is 1 if a goal was missed."""
        columns = ("quantity", "value", "goal", "")
        Console(width=TABLE_WIDTH).print(as_table(columns, self._rows))
        print(f"{self.num_missed} of {len(self._rows)} goals were missed")
        return int(self.num_missed > 0)
