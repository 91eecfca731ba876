"""What the suite's numbers should be on two cores, and whether they are.

A goal is a ratio of cases that took turns, or a plain limit where that is what a user
feels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from envserve.bench.harness import Outcome
from envserve.bench.images import REUSING
from envserve.bench.load import SPEED
from envserve.bench.ours import IN_PROCESS, IPC, TCP
from envserve.bench.peers import ASYNC, ENVPOOL
from envserve.bench.step import LIMIT

__all__ = ["GOALS", "Goal", "goals_table"]

Result = Mapping[str, Any]
"""A result.json."""


@dataclass(frozen=True)
class Goal:
    """A number that should be reached.

    Attributes:
      part: The part of the suite that measures it.
      meaning: What it is.
      bound: What it should be at least; at most where `is_upper_bound`.
      value: Finds it in the part's result; None where a case was skipped.
      is_upper_bound: Whether less is better.
    """

    part: str
    meaning: str
    bound: float
    value: Callable[[Result], float | None]
    is_upper_bound: bool = False

    def is_met_by(self, value: float) -> bool:
        """Returns whether a number is good enough."""
        return value <= self.bound if self.is_upper_bound else value >= self.bound


def ratio(
    case: str, base: str, number: str = SPEED
) -> Callable[[Result], float | None]:
    """Returns what finds a case's ratio to another."""
    return lambda result: _outcome(result).ratio(case, base, number)


def _outcome(result: Result) -> Outcome:
    return Outcome(result["repetitions"])


def _median(case: str, number: str) -> Callable[[Result], float | None]:
    def find(result: Result) -> float | None:
        outcome = _outcome(result)
        return outcome.median(case, number) if case in outcome.measured else None

    return find


def _overlap(result: Result) -> float | None:
    measured = _median("2 splits", "us_per_batch_step")(result)
    if measured is None:
        return None
    best: float = result["results"]["best_us"]["2 splits"]
    return best / measured


def _loop_ratio(result: Result) -> float | None:
    outcome, number = _outcome(result), "us_per_batch_step"
    loops = [case for case in outcome.measured if case.startswith("Python loop")]
    ratios = [outcome.ratio(case, "simulate()", number) for case in loops]
    return min((value for value in ratios if value is not None), default=None)


def _beyond_lane(result: Result) -> float | None:
    value: float | None = result["results"]["beyond_the_lane_us"].get("simulate()")
    return value


def _gigabytes(case: str) -> Callable[[Result], float | None]:
    def find(result: Result) -> float | None:
        speed = _median(case, SPEED)(result)
        return None if speed is None else speed / 1e9 * result["results"]["image_bytes"]

    return find


def _growth(result: Result) -> float | None:
    outcome = _outcome(result)
    sizes = itertools.pairwise(outcome.measured)
    growths = (outcome.median(a, SPEED) / outcome.median(b, SPEED) for a, b in sizes)
    return max(growths, default=None)


def _megabytes(result: Result) -> float | None:
    memory = result["results"]["proportional_set_bytes"]
    most, base = memory.get("1024 envs"), memory[result["results"]["base"]]
    return None if most is None else float(most - base) / 1e6


GOALS: Final = (
    Goal("step-cheetah-16", "in-process / limit", 0.75, ratio(IN_PROCESS, LIMIT)),
    Goal("step-cheetah-16", "in-process / Async", 4, ratio(IN_PROCESS, ASYNC)),
    Goal("step-cheetah-64", "in-process / limit", 0.85, ratio(IN_PROCESS, LIMIT)),
    Goal("step-cheetah-64", "in-process / Async", 7, ratio(IN_PROCESS, ASYNC)),
    Goal("step-cheetah-64", "in-process / EnvPool", 1, ratio(IN_PROCESS, ENVPOOL)),
    Goal("step-cheetah-64", "ipc / limit", 0.75, ratio(IPC, LIMIT)),
    Goal("step-cheetah-64", "ipc / Async", 5, ratio(IPC, ASYNC)),
    Goal("step-cheetah-64", "tcp / limit", 0.75, ratio(TCP, LIMIT)),
    Goal("step-cheetah-64", "tcp / Async", 5, ratio(TCP, ASYNC)),
    Goal("step-cartpole-64", "in-process / limit", 0.7, ratio(IN_PROCESS, LIMIT)),
    Goal("step-cartpole-64", "in-process / Async", 12, ratio(IN_PROCESS, ASYNC)),
    Goal("step-cartpole-256", "tcp / limit", 0.55, ratio(TCP, LIMIT)),
    Goal(
        "train",
        "update, SB3 / ppo",
        14,
        ratio("SB3, SubprocVecEnv", "ppo", "update_seconds"),
    ),
    Goal(
        "train",
        "end to end, SB3 with SubprocVecEnv / ppo",
        8,
        ratio("SB3, SubprocVecEnv", "ppo", "total_seconds"),
    ),
    Goal(
        "train",
        "end to end, SB3 with DummyVecEnv / ppo",
        6,
        ratio("SB3, DummyVecEnv", "ppo", "total_seconds"),
    ),
    Goal("simulate-cartpole-16", "faster Python loop / simulate()", 2, _loop_ratio),
    Goal(
        "simulate-cheetah-16", "simulate() beyond the lane, us", 150, _beyond_lane, True
    ),
    Goal("overlap", "best possible / measured, 2 splits", 0.9, _overlap),
    Goal(
        "straggler",
        "one slow / none slow, in-process",
        0.9,
        ratio("in-process: one slow", "in-process: none slow"),
    ),
    Goal(
        "straggler",
        "one slow / none slow, tcp",
        0.9,
        ratio("tcp: one slow", "tcp: none slow"),
    ),
    Goal(
        "slow-reset",
        "slow resets with spare envs / quick resets",
        0.9,
        ratio("slow resets, spare envs", "quick resets"),
    ),
    Goal("images", "in-process, GB/s", 2, _gigabytes(IN_PROCESS)),
    Goal("images", "in-process with out=, GB/s", 2, _gigabytes(REUSING)),
    Goal("images", "tcp, GB/s", 0.7, _gigabytes(TCP)),
    Goal("scale", "largest growth of the cost per env step", 1, _growth, True),
    Goal("scale", "memory of 1,024 envs beyond the imports, MB", 500, _megabytes, True),
    Goal(
        "start",
        "first observation, seconds",
        4,
        _median("envserve, first observation", "seconds"),
        True,
    ),
    Goal(
        "start",
        "import envserve.client, seconds",
        0.5,
        _median("import envserve.client", "seconds"),
        True,
    ),
    Goal(
        "start",
        "envserve start until ready, seconds",
        2,
        _median("envserve start, ready line", "seconds"),
        True,
    ),
)


def goals_table(results: Mapping[str, Result]) -> str:
    """Returns a table in Markdown of the goals of those parts that there are."""
    lines = ["| part | goal | | measured | met |", "| --- | --- | ---: | ---: | --- |"]
    for goal in GOALS:
        if goal.part not in results:
            continue
        value = goal.value(results[goal.part])
        sign = "<=" if goal.is_upper_bound else ">="
        measured, met = "-", "skipped"
        if value is not None:
            measured, met = f"{value:.3g}", "yes" if goal.is_met_by(value) else "no"
        cells = (goal.part, goal.meaning, f"{sign} {goal.bound:g}", measured, met)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
