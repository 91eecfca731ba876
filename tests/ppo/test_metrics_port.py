"""`TrainerMetrics`: the latest row and the env statistics, served to Prometheus."""

import math
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from envserve.client import BatchStats
from ppo.cli.train import Monitors
from ppo.metrics_port import TrainerMetrics
from ppo.train import Progress


def read(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address, timeout=60) as response:
        text = response.read().decode()
    samples = [
        (" ".join([name, *labels.values()]), value)
        for family in text_string_to_metric_families(text)
        for name, labels, value, *_ in family.samples
    ]
    assert len(dict(samples)) == len(samples), "names of samples are unique"
    return dict(samples)


STATS = BatchStats(
    steps=5,
    rows=20,
    valid_rows=17,
    invalid_rows={"WORKER_DIED": 3},
    latency_seconds={"p50": 0.25},
    lanes={"local": {"restarts": 2}},
)


def test_latest_row_and_statistics_of_the_envs_are_served() -> None:
    with TrainerMetrics(0) as metrics:
        assert read(metrics.address) == {"ppo_env_steps_total": 0}
        metrics.update(10, {"mean_return": 1.0}, STATS)
        metrics.update(20, {"mean_return": 9.5, "kl": math.nan}, STATS)
        found = read(metrics.address)
    assert math.isnan(found.pop("ppo_kl"))
    assert found == {
        "ppo_env_steps_total": 20,
        "ppo_mean_return": 9.5,
        "ppo_rows_total OK": 17,
        "ppo_rows_total WORKER_DIED": 3,
        "ppo_lane_events_total restarts local": 2,
        "ppo_batch_seconds p50": 0.25,
    }


def test_names_are_unique_and_valid() -> None:
    names = ("a.b", "a_b", "a-b", "a b_", "a_b_", "ä", "", "\n", "\0", "rows_total")
    row = {name: float(index) for index, name in enumerate(names)}
    row |= {"env_steps_total": 10.0, "env_steps": 11.0, "batch_seconds": 12.0}
    row |= {"lane_events_total": 13.0, "lane_events": 14.0, "rows": 15.0}
    lane = 'ipc:///tmp/\n\r\0"\\ü'
    stats = replace(STATS, lanes={lane: {"restarts": 2}})
    with TrainerMetrics(0) as metrics:
        metrics.update(20, row, stats)
        found = read(metrics.address)
        metrics.update(20, dict(reversed(row.items())), stats)
        assert read(metrics.address) == found
    assert found.pop("ppo_env_steps_total") == 20
    assert (found["ppo_a_b"], found["ppo_a_b_"]) == (1, 4)
    assert found.pop(f"ppo_lane_events_total restarts {lane}") == 2
    assert found.pop("ppo_batch_seconds p50") == 0.25
    assert [found.pop(f"ppo_rows_total {k}") for k in ("OK", "WORKER_DIED")] == [17, 3]
    assert sorted(found.values()) == [*range(len(row))]


def test_no_metric_has_the_name_of_the_family_of_a_counter() -> None:
    """OpenMetrics, unlike the text format, names a counter `x_total` only `x`."""
    row = dict.fromkeys(("env_steps", "rows", "lane_events"), 1.0)
    with TrainerMetrics(0) as metrics:
        metrics.update(20, row, STATS)
        names = [family.name for family in metrics.collect()]
    assert len({*names}) == len(names)


def test_metrics_of_an_evaluation_are_served_until_the_next_one() -> None:
    printed: list[str] = []
    screen: Any = SimpleNamespace(print=printed.append, show=lambda _: None)
    env: Any = SimpleNamespace(stats=lambda: STATS)
    plan: Any = SimpleNamespace(env_source=SimpleNamespace(addresses=["tcp://sim1"]))
    with Monitors(screen, has_page=False, port=0, host="127.0.0.1") as watchers:
        watchers.begin(env, plan)
        for steps, metrics in enumerate([{"evaluation_return": 5.0}, {"kl": 0.25}]):
            watchers.show(Progress(steps, 0.0, 0.0, 0, metrics))
        found = read(printed[0].removeprefix("Metrics: "))
    assert found["ppo_evaluation_return"] == 5.0
    assert found["ppo_kl"] == 0.25
