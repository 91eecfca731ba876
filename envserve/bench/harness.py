"""Cases take turns, so that a machine's moods meet all of them alike.

What counts are ratios of cases measured side by side, and the median over the turns.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envserve.bench.case_process import BenchmarkError, Case, CaseProcess

__all__ = ["Outcome", "chosen", "take_turns"]


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    Attributes:
      measured: By case, one mapping of numbers by name per repetition.
      skipped: By case, why it could not run.
    """

    measured: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def values(self, case: str, number: str) -> list[float]:
        """Returns a number of a case in each repetition."""
        return [repetition[number] for repetition in self.measured[case]]

    def all_values(self, number: str) -> dict[str, list[float]]:
        """Returns a number of all cases in each repetition."""
        return {case: self.values(case, number) for case in self.measured}

    def median(self, case: str, number: str) -> float:
        """Returns the median over the repetitions."""
        return statistics.median(self.values(case, number))

    def ratio(self, case: str, base: str, number: str) -> float | None:
        """Returns the median of a case's ratio to another within each repetition.

        None where either was not measured.
        """
        if case not in self.measured or base not in self.measured:
            return None
        pairs = zip(self.values(case, number), self.values(base, number), strict=True)
        return statistics.median(value / other for value, other in pairs)

    def medians(self) -> dict[str, dict[str, float]]:
        """Returns all medians, by case and number."""
        return {
            case: {number: self.median(case, number) for number in repetitions[0]}
            for case, repetitions in self.measured.items()
        }


def take_turns(
    cases: Sequence[Case],
    repetitions: int,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measures every case once per repetition, in turns.

    Args:
      cases: What to measure; all are open at the same time.
      repetitions: How often.
      say: Told what is going on.

    Raises:
      BenchmarkError: A case failed, or all must be skipped.
    """
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(CaseProcess(case)) for case in cases]
        ready = []
        for process in running:
            say(f"starting {process.name}")
            reason = process.wait_until_ready()
            if reason is None:
                ready.append(process)
                outcome.measured[process.name] = []
            else:
                outcome.skipped[process.name] = reason
        if not ready:
            reasons = "; ".join(f"{n}: {why}" for n, why in outcome.skipped.items())
            raise BenchmarkError(f"nothing can be measured: {reasons}")
        for repetition in range(repetitions):
            # To and fro: no case always comes right after the same other one.
            for process in ready if repetition % 2 == 0 else reversed(ready):
                say(f"{repetition + 1} of {repetitions}: {process.name}")
                outcome.measured[process.name].append(process.measure())
    return outcome


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Returns the cases whose names have one of some words in them; without, all.

    Raises:
      BenchmarkError: There is no such case.
    """
    for word in only:
        if not any(word.lower() in case.name.lower() for case in cases):
            names = ", ".join(case.name for case in cases)
            raise BenchmarkError(
                f"--only: expected part of one of {names}; got {word!r}"
            )
    return [
        case
        for case in cases
        if not only or any(word.lower() in case.name.lower() for word in only)
    ]
