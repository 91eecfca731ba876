"""What a trainer shows to Prometheus: its latest row, and counts of its envs."""

import math
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from envserve.client import BatchStats
from ppo.metrics_port import TrainerMetrics


def read(metrics: TrainerMetrics) -> dict[str, float]:
    with urllib.request.urlopen(metrics.address, timeout=60) as answer:
        text = answer.read().decode()
    return {
        " ".join([name, *labels.values()]): value
        for family in text_string_to_metric_families(text)
        for name, labels, value, *_ in family.samples
    }


def test_the_latest_row_is_shown_with_what_the_envs_have_counted() -> None:
    stats = BatchStats(
        steps=5,
        rows=20,
        valid_rows=17,
        invalid_rows={"WORKER_DIED": 3},
        latency_seconds={"p50": 0.25},
        lanes={"local": {"restarts": 2}},
    )
    with TrainerMetrics(0) as metrics:
        assert read(metrics) == {"ppo_env_steps_total": 0}
        metrics.update(10, {"mean_return": 1.0}, stats)
        metrics.update(20, {"mean_return": 9.5, "kl": math.nan}, stats)
        found = read(metrics)
    assert math.isnan(found.pop("ppo_kl"))
    assert found == {
        "ppo_env_steps_total": 20,
        "ppo_mean_return": 9.5,
        "ppo_rows_total OK": 17,
        "ppo_rows_total WORKER_DIED": 3,
        "ppo_lane_events_total restarts local": 2,
        "ppo_batch_seconds p50": 0.25,
    }
