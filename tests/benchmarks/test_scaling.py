"""The cost model of large batches: its fit, its predictions and its documentation."""

import json
from pathlib import Path

import pytest

from benchmarks.scaling.document import tables, write_document
from benchmarks.scaling.measure import Point, measure
from benchmarks.scaling.model import Model, errors, fit, plan
from benchmarks.support.processes import temporary_keys

DOCS = Path(__file__).parents[2] / "docs"
MODEL = Model(split=50.0, server=40.0, env=0.5, kilobyte=0.25)
GRID = [
    Point(servers, envs, size)
    for servers in (1, 4, 16)
    for envs, size in ((1, 16), (64, 16), (16, 28224))
]


def test_the_tables_of_the_page_match_its_numbers(tmp_path: Path) -> None:
    """If this fails, run `python scripts/scaling.py document`."""
    numbers = json.loads((DOCS / "scaling.json").read_text())
    copy = tmp_path / "scaling.md"
    copy.write_text((DOCS / "scaling.md").read_text("utf-8"), encoding="utf-8")
    write_document(copy, numbers)
    assert copy.read_text("utf-8") == (DOCS / "scaling.md").read_text("utf-8")
    # Check one value independently of the code that writes the tables.
    by_point = {tuple(found[:5]): found[8] for found in reversed(numbers["check"])}
    one, many = by_point[1, 1024, 16, False, 1], by_point[64, 16, 16, False, 1]
    assert f"thread | 15 | {(many - one) / 63:.0f} |" in tables(numbers)["goals"]


def test_fitting_recovers_the_model_from_its_predictions() -> None:
    assert MODEL.predict(Point(4, 16, 1000, splits=2)) == 100 + 320 + 32 + 16
    measured = [p._replace(thread=MODEL.predict(p)) for p in GRID]
    assert fit(measured, "thread") == pytest.approx(MODEL)
    assert errors(MODEL, measured, "thread") == [0.0] * len(GRID)


def test_fitted_costs_are_not_negative() -> None:
    negative = MODEL._replace(env=-0.01)
    found = fit([p._replace(process=negative.predict(p)) for p in GRID], "process")
    assert found.env == 0.0
    assert found.server == pytest.approx(40.0, rel=0.05)


def test_the_plan_has_as_many_hosts_as_the_trainer_handles_during_a_split() -> None:
    # The 4 envs of a core take 4 ms, and two round trips take 400 us. The trainer takes
    # 100 us for two splits, and for each host 80 us, plus 32 us for its 64 envs and 16
    # us for 64 kB.
    steps = 33 * 64 / 4.4e-3
    assert plan(MODEL, 1000.0, 1000) == pytest.approx((33, steps, steps * 8e-6))
    # With a trainer that is twice as slow: (4400 - 200) / 256.
    assert plan(MODEL, 1000.0, 1000, slowdown=2.0).hosts == 16
    # With cheap envs, the trainer is slower than one host: a step takes its 228 us.
    found = plan(MODEL, 10.0, 1000, round_trip_us=0.0)
    assert found.hosts == 1
    assert found.steps == pytest.approx(64 / 228e-6)


@pytest.mark.parametrize(
    "point",
    [
        Point(2, 3, 16),
        Point(2, 4, 1024, keys=True, splits=2),
        Point(1, 2, 16, servers_are="real"),
    ],
)
def test_a_point_is_measured_on_servers(point: Point) -> None:
    with temporary_keys():
        found = measure(point, 0.01)
    assert found[:8] == point[:8]
    assert 0 < found.thread <= found.process
    # At least a request of 44 bytes, a reply of 44 bytes, and the observations. Up to
    # one of the three measured steps may be missing, because it was in flight.
    assert found.wire > 2 / 3 * (point.servers * 88 + point.num_envs * point.size)


def test_simulated_envs_take_the_given_time() -> None:
    with temporary_keys():
        assert measure(Point(2, 1, 16, env_us=20_000.0), 0.01).wall >= 20_000
