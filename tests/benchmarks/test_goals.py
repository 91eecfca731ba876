"""The values of goals are computed from saved results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goals import GOALS, goals_table
from benchmarks.suite import PARTS


def speeds(**medians: float) -> dict[str, Any]:
    names = {
        "limit": "limit: bare loops",
        "ours": "envserve in-process",
        "peer": "gymnasium AsyncVectorEnv",
    }
    return {
        "repetitions": {
            names[case]: [{"steps_per_second": value}] * 3
            for case, value in medians.items()
        }
    }


def microseconds(**cases: float) -> dict[str, list[dict[str, float]]]:
    return {name: [{"us_per_batch_step": value}] for name, value in cases.items()}


def value_of(part: str, meaning: str, result: dict[str, Any]) -> float | None:
    (goal,) = (g for g in GOALS if (g.part, g.meaning) == (part, meaning))
    return goal.value(result)


def test_every_goal_belongs_to_a_part_of_the_suite() -> None:
    assert {goal.part for goal in GOALS} <= PARTS.keys()


def test_the_table_shows_which_goals_are_met_and_which_were_skipped() -> None:
    rows = goals_table({"step-cheetah-16": speeds(ours=8.0, limit=10.0)}).splitlines()
    assert rows[2:] == [
        "| step-cheetah-16 | in-process / limit | >= 0.75 | 0.8 | yes |",
        "| step-cheetah-16 | in-process / Async | >= 4 | - | skipped |",
        "| step-cheetah-16 | make_vec / Async | >= 2.5 | - | skipped |",
        "| step-cheetah-16 | tcp / tcp, no keys | >= 0.85 | - | skipped |",
    ]
    rows = goals_table({"step-cheetah-16": speeds(ours=7.0, peer=1.0)}).splitlines()
    assert rows[3].endswith("| >= 4 | 7 | yes |")
    rows = goals_table({"step-cheetah-16": speeds(ours=7.0, peer=2.0)}).splitlines()
    assert rows[3].endswith("| >= 4 | 3.5 | no |")


def test_overlap_is_the_ratio_of_best_possible_to_measured_time() -> None:
    result = {
        "repetitions": microseconds(**{"2 splits": 10_000.0}),
        "results": {"best_us": {"2 splits": 9_000.0}},
    }
    assert value_of("overlap", "best possible / measured, 2 splits", result) == 0.9


def test_growth_is_the_largest_from_one_size_to_the_next() -> None:
    values = {"4 envs": 100.0, "16 envs": 300.0, "64 envs": 200.0, "256 envs": 400.0}
    result = {
        "repetitions": {c: [{"steps_per_second": v}] for c, v in values.items()},
        "results": {
            "base": "2 envs",
            "proportional_set_bytes": {"1024 envs": 90e6, "2 envs": 80e6},
        },
    }
    assert value_of("scale", "largest growth of the cost per env step", result) == 1.5
    meaning = "memory of 1,024 envs beyond the imports, MB"
    assert value_of("scale", meaning, result) == pytest.approx(10)


@pytest.mark.parametrize("part", sorted({goal.part for goal in GOALS}))
def test_a_goal_whose_cases_are_missing_is_skipped(part: str) -> None:
    results = {
        "best_us": {"2 splits": 9_000.0},
        "beyond_the_lane_us": {},
        "image_bytes": 20_000,
        "base": "2 envs",
        "proportional_set_bytes": {"2 envs": 80e6},
    }
    table = goals_table({part: {"repetitions": {}, "results": results}})
    rows = table.splitlines()[2:]
    assert len(rows) == sum(goal.part == part for goal in GOALS)
    assert all(row.endswith("| - | skipped |") for row in rows)


def test_the_speed_of_images_is_in_bytes_per_second() -> None:
    result = {
        "repetitions": {"envserve tcp": [{"steps_per_second": 50_000.0}]},
        "results": {"image_bytes": 20_000},
    }
    assert value_of("images", "tcp, GB/s", result) == pytest.approx(1.0)


def test_the_cost_of_the_guarantees_is_relative_to_the_bare_slab() -> None:
    case = "CartPole-v1, 16 envs"
    ways = {f"{case}: bare slab": 100.0, f"{case}: BatchEnv.local": 85.0}
    result = {"repetitions": {c: [{"steps_per_second": v}] for c, v in ways.items()}}
    meaning = f"{case}, BatchEnv.local / bare slab"
    assert value_of("guarantees", meaning, result) == 0.85
    bounds = {g.meaning: g.bound for g in GOALS if g.part == "guarantees"}
    assert sorted(bounds.values()) == [0.8, 0.9, 0.9, 0.9]
    assert bounds[meaning] == 0.8
