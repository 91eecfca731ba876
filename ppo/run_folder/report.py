"""When something that happens every so many steps is due, and what a report then says.

A report covers all iterations since the last one: counts and times are added up, what
is a state is that of the last iteration, and all else is averaged over iterations.
"""

import math
from collections.abc import Mapping

__all__ = ["ReportWindow", "is_due"]

_SUM = {"invalid_steps", "lost_episodes", "rollout_seconds", "update_seconds"}
_MAXIMUM = {"policy_lag", "ratio_deviation"}
_LAST = {"iteration", "kl_penalty", "learning_rate", "mean_length", "mean_return"}


def is_due(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` steps was reached on the way; never if it is 0."""
    return every > 0 and before // every < after // every


class ReportWindow:
    """Joins the numbers of iterations to one row."""

    def __init__(self) -> None:
        self._steps = 0
        self._values: dict[str, list[float]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._values)

    def add(self, steps: int, values: Mapping[str, float]) -> None:
        """Take in an iteration that collected so many valid steps."""
        self._steps += steps
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the row, with throughputs, and begin a new one."""
        row = {name: _joined(name, values) for name, values in self._values.items()}
        rollout, update = row["rollout_seconds"], row["update_seconds"]
        row["steps_per_second"] = _per_second(self._steps, rollout + update)
        row["rollout_steps_per_second"] = _per_second(self._steps, rollout)
        row["update_steps_per_second"] = _per_second(self._steps, update)
        self._steps = 0
        self._values = {}
        return row


def _joined(name: str, values: list[float]) -> float:
    if name in _LAST:
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if name in _SUM:
        return sum(known)
    if not known:
        return math.nan
    return max(known) if name in _MAXIMUM else sum(known) / len(known)


def _per_second(steps: int, seconds: float) -> float:
    return steps / seconds if seconds > 0 else math.nan
