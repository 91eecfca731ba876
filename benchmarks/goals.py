"""Goals for the results of the suite on two cores, and a table of goals and results.

Most goals are ratios of cases that were measured alternately. Quantities that users
notice directly, such as the time to start, have absolute limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.cases.guarantees import BARE_SLAB, OURS
from benchmarks.cases.images import REUSING
from benchmarks.cases.ours import IN_PROCESS, IPC, LIMIT, MAKE_VEC, TCP, WITHOUT_KEYS
from benchmarks.cases.peers import ASYNC, ENVPOOL, SERVED_ENVPOOL
from benchmarks.learning.sac import SAC, SB3_SAC
from benchmarks.learning.simulate import SIMULATE, STEP
from benchmarks.learning.stalls import case_name
from benchmarks.support.tables import as_markdown
from envserve.bench.interleaved import MICROSECONDS, SPEED, Measurements

Result = Mapping[str, Any]
"""The contents of a `result.json`."""
Value = Callable[[Result], float | None]
"""Function that computes a number from a result; None if a case was skipped."""


@dataclass(frozen=True)
class Goal:
    """A goal for one number.

    Attributes:
      part: Part of the suite that measures the number.
      bound: Lower bound of the number, or upper bound if `is_upper_bound`.
    """

    part: str
    meaning: str
    bound: float
    value: Value
    is_upper_bound: bool = False

    def is_met_by(self, value: float) -> bool:
        """Return whether a number meets the goal."""
        return value <= self.bound if self.is_upper_bound else value >= self.bound


def _ratio(case: str, base: str, number: str = SPEED) -> Value:
    """Return a function that computes the ratio of `case` to `base` in a metric."""
    return lambda result: _measurements(result).ratio(case, base, number)


def _measurements(result: Result) -> Measurements:
    return Measurements(result["repetitions"])


def _median(case: str, number: str = "seconds") -> Value:
    def value(result: Result) -> float | None:
        measured = _measurements(result)
        return measured.median(case, number) if case in measured.by_case else None

    return value


def _overlap(result: Result) -> float | None:
    """Return the ratio of optimal to measured time of a batch step, with two splits."""
    measured = _median("2 splits", MICROSECONDS)(result)
    if measured is None:
        return None
    best: float = result["results"]["best_us"]["2 splits"]
    return best / measured


def _gigabytes(case: str) -> Value:
    def value(result: Result) -> float | None:
        speed = _median(case, SPEED)(result)
        return None if speed is None else speed / 1e9 * result["results"]["image_bytes"]

    return value


def _growth(result: Result) -> float | None:
    """Return the largest factor by which the time per env step grows.

    Each batch size is compared with the next smaller one.
    """
    measured = _measurements(result)
    sizes = itertools.pairwise(measured.by_case)
    growths = (measured.median(a, SPEED) / measured.median(b, SPEED) for a, b in sizes)
    return max(growths, default=None)


def _megabytes(result: Result) -> float | None:
    """Return the memory of 1,024 envs in MB, minus that of one env per worker."""
    memory = result["results"]["proportional_set_bytes"]
    total, base = memory.get("1024 envs"), memory[result["results"]["base"]]
    return None if total is None else float(total - base) / 1e6


def _at_most(part: str, meaning: str, bound: float, value: Value) -> Goal:
    return Goal(part, meaning, bound, value, is_upper_bound=True)


def _bare_slab_goal(env_name: str, num_envs: int, bound: float) -> Goal:
    case = f"{env_name}, {num_envs} envs"
    value = _ratio(f"{case}: {OURS}", f"{case}: {BARE_SLAB}")
    return Goal("guarantees", f"{case}, {OURS} / {BARE_SLAB}", bound, value)


def _simulate_goal(part: str, bound: float) -> Goal:
    value = _ratio(SIMULATE, STEP, MICROSECONDS)
    return _at_most(part, f"{SIMULATE} / {STEP}", bound, value)


def _stalls_goal(stall_name: str, bound: float) -> Goal:
    case, base = (case_name(stall_name, act_on) for act_on in (0.25, 1.0))
    return Goal("stalls", f"{case} / {base}", bound, _ratio(case, base))


def _sb3_goal(part: str, vec_env: str, bound: float) -> Goal:
    value = _ratio(f"SB3, {vec_env}", "ppo", "total_seconds")
    return Goal(part, f"end to end, SB3 with {vec_env} / ppo", bound, value)


def _served_goal(part: str, bound: float) -> Goal:
    value = _ratio("ppo", "ppo, tcp server", "total_seconds")
    return Goal(part, "steps/s of ppo, tcp server / in-process", bound, value)


def _sb3_on_envserve_goal(num_envs: int, bound: float) -> Goal:
    value = _ratio("SB3, SubprocVecEnv", "SB3, envserve.sb3", "total_seconds")
    meaning = "SB3 end to end, SubprocVecEnv / envserve.sb3"
    return Goal(f"train-sb3-{num_envs}", meaning, bound, value)


def _served_envpool_goal(meaning: str, bound: float, base: str) -> Goal:
    value = _ratio(SERVED_ENVPOOL, base)
    return Goal("step-cartpole-256", f"EnvPool's behind tcp / {meaning}", bound, value)


def _keys_goal(part: str) -> Goal:
    return Goal(part, "tcp / tcp, no keys", 0.85, _ratio(TCP, WITHOUT_KEYS))


def _straggler_goal(transport: str) -> Goal:
    value = _ratio(f"{transport}: one slow", f"{transport}: none slow")
    return Goal("straggler", f"one slow / none slow, {transport}", 0.9, value)


_UPDATE: Final = _ratio("SB3, SubprocVecEnv", "ppo", "update_seconds")
_SPARE: Final = _ratio("slow resets, spare envs", "quick resets")
GOALS: Final = (
    Goal("step-cheetah-16", "in-process / limit", 0.75, _ratio(IN_PROCESS, LIMIT)),
    Goal("step-cheetah-16", "in-process / Async", 4, _ratio(IN_PROCESS, ASYNC)),
    Goal("step-cheetah-16", "make_vec / Async", 2.5, _ratio(MAKE_VEC, ASYNC)),
    Goal("step-cheetah-64", "make_vec / Async", 5, _ratio(MAKE_VEC, ASYNC)),
    Goal("step-cheetah-64", "in-process / limit", 0.85, _ratio(IN_PROCESS, LIMIT)),
    Goal("step-cheetah-64", "in-process / Async", 7, _ratio(IN_PROCESS, ASYNC)),
    Goal("step-cheetah-64", "in-process / EnvPool", 1, _ratio(IN_PROCESS, ENVPOOL)),
    Goal("step-cheetah-64", "ipc / limit", 0.75, _ratio(IPC, LIMIT)),
    Goal("step-cheetah-64", "ipc / Async", 5, _ratio(IPC, ASYNC)),
    Goal("step-cheetah-64", "tcp / limit", 0.75, _ratio(TCP, LIMIT)),
    Goal("step-cheetah-64", "tcp / Async", 5, _ratio(TCP, ASYNC)),
    Goal("step-cartpole-64", "in-process / limit", 0.7, _ratio(IN_PROCESS, LIMIT)),
    Goal("step-cartpole-64", "in-process / Async", 12, _ratio(IN_PROCESS, ASYNC)),
    Goal("step-cartpole-256", "tcp / limit", 0.55, _ratio(TCP, LIMIT)),
    *map(_keys_goal, ("step-cheetah-16", "step-cheetah-64", "step-cartpole-64")),
    *map(_keys_goal, ("step-cartpole-256", "images")),
    _served_envpool_goal("tcp, one env at a time", 4, TCP),
    _served_envpool_goal("EnvPool", 0.5, ENVPOOL),
    _bare_slab_goal("HalfCheetah-v5", 16, 0.9),
    _bare_slab_goal("HalfCheetah-v5", 64, 0.9),
    _bare_slab_goal("CartPole-v1", 16, 0.8),
    _bare_slab_goal("CartPole-v1", 64, 0.9),
    Goal("train", "update, SB3 / ppo", 14, _UPDATE),
    _sb3_goal("train", "SubprocVecEnv", 8),
    _sb3_goal("train", "DummyVecEnv", 6),
    _sb3_goal("train-64", "SubprocVecEnv", 10),
    _sb3_goal("train-64", "DummyVecEnv", 7),
    _served_goal("train", 0.8),
    _served_goal("train-64", 0.88),
    _sb3_on_envserve_goal(16, 1.5),
    _sb3_on_envserve_goal(64, 3),
    Goal("sac", "env steps/s, ppo / SB3", 3, _ratio(SAC, SB3_SAC)),
    _simulate_goal("simulate-cartpole-16", 1.15),
    _simulate_goal("simulate-cartpole-64", 1.1),
    _simulate_goal("simulate-cheetah-16", 1.1),
    _simulate_goal("simulate-cheetah-64", 1.1),
    _stalls_goal("stalls", 4),
    Goal("overlap", "best possible / measured, 2 splits", 0.9, _overlap),
    _straggler_goal("in-process"),
    _straggler_goal("tcp"),
    Goal("slow-reset", "slow resets with spare envs / quick resets", 0.9, _SPARE),
    Goal("images", "in-process, GB/s", 2, _gigabytes(IN_PROCESS)),
    Goal("images", "in-process with out=, GB/s", 2, _gigabytes(REUSING)),
    Goal("images", "tcp, GB/s", 0.7, _gigabytes(TCP)),
    _at_most("scale", "largest growth of the cost per env step", 1, _growth),
    _at_most("scale", "memory of 1,024 envs beyond the imports, MB", 500, _megabytes),
    *(
        _at_most("start", f"{meaning}, seconds", bound, _median(case))
        for meaning, bound, case in (
            ("first observation", 4, "envserve, first observation"),
            ("import of BatchEnv", 0.5, "import of BatchEnv"),
            ("envserve start until ready", 2, "envserve start, ready line"),
        )
    ),
)


def goals_table(results: Mapping[str, Result]) -> str:
    """Return a Markdown table of the goals of all parts that have results."""
    rows = []
    for goal in GOALS:
        if goal.part not in results:
            continue
        value = goal.value(results[goal.part])
        sign = "<=" if goal.is_upper_bound else ">="
        measured, verdict = "-", "skipped"
        if value is not None:
            measured, verdict = f"{value:.3g}", "yes" if goal.is_met_by(value) else "no"
        bound = f"{sign} {goal.bound:g}"
        rows.append([goal.part, goal.meaning, bound, measured, verdict])
    return as_markdown(["part", "goal", "", "measured", "met"], rows, num_texts=2)
