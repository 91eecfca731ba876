"""The result of a case: counts, times, and whether its goals were reached."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Check:
    """A measurement and its goal.

    Attributes:
      meaning: Name of the measured quantity, with its unit.
      measured: The measured number; nan if nothing was measured, which misses every
      goal.
      bound: The number to compare `measured` with.
      kind: The comparison: "<=", ">=" or "==".
    """

    meaning: str
    measured: float
    bound: float
    kind: str = "<="

    @property
    def is_met(self) -> bool:
        if self.kind == "==":
            return self.measured == self.bound
        if self.kind == ">=":
            return self.measured >= self.bound
        return self.measured <= self.bound


@dataclass
class CaseResult:
    """The result of a case, filled while the case runs so that it survives a failure.

    Attributes:
      row_steps: Number of rows that the ledger verified.
      wrong: Number of wrong rows; a case ends with the first one.
      padding: Number of PENDING rows.
      late: Number of LATE rows.
      seconds: Times from a fault to the next valid row.
    """

    faults: int = 0
    row_steps: int = 0
    wrong: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    padding: int = 0
    late: int = 0
    seconds: list[float] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    skipped: str = ""
    elapsed: float = 0.0

    def check(
        self, meaning: str, measured: float, bound: float, kind: str = "<="
    ) -> None:
        self.checks.append(Check(meaning, float(measured), float(bound), kind))

    def quantile(self, percent: float) -> float:
        """Return a percentile of `seconds`, or nan if there are none."""
        return float(np.percentile(self.seconds, percent)) if self.seconds else np.nan

    @property
    def missed(self) -> list[Check]:
        return [check for check in self.checks if not check.is_met]

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        if self.wrong:
            return "WRONG"
        if self.error:
            return "failed"
        return "goal missed" if self.missed else "pass"

    @property
    def is_sound(self) -> bool:
        return not (self.wrong or self.error)

    def as_json(self) -> dict[str, Any]:
        """Return the result in the format of the case's JSON file."""
        checks = [
            {
                "meaning": check.meaning,
                "measured": check.measured if np.isfinite(check.measured) else None,
                "goal": f"{check.kind} {check.bound:g}",
                "is_met": check.is_met,
            }
            for check in self.checks
        ]
        names = ("faults", "row_steps", "wrong", "padding", "late", "notes", "error")
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in (*names, "skipped")},
            "losses": dict(self.losses),
            "latency_seconds": summary(self.seconds),
            "checks": checks,
            "elapsed_seconds": round(self.elapsed, 3),
        }


def summary(seconds: list[float]) -> dict[str, float | None]:
    if not seconds:
        return {"count": 0, "p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"count": len(seconds), "p50": p50, "p99": p99, "max": max(seconds)}
