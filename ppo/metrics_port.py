"""What a trainer reports, at a port where Prometheus reads it; see docs/metrics.md."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from envserve.client import BatchStats
from envserve.monitoring.metrics_port import MetricsPort

if TYPE_CHECKING:
    from prometheus_client import Metric


class TrainerMetrics(MetricsPort):
    """Shows the latest row of metrics, and counts of the envs; see `MetricsPort`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(port, host)
        self._seen: tuple[int, Mapping[str, float], BatchStats | None] = (0, {}, None)
        self.start_serving(self)

    def update(self, steps: int, row: Mapping[str, float], stats: BatchStats) -> None:
        """Take what is to be shown from now on: env steps so far, a row, counts."""
        self._seen = steps, dict(row), stats

    def collect(self) -> Iterator["Metric"]:
        """Return all metrics; a number of the row is a gauge of its name."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        steps, row, stats = self._seen
        yield CounterMetricFamily("ppo_env_steps", "Env steps of this run.", steps)
        for name, value in row.items():
            name = re.sub(r"\W", "_", f"ppo_{name}", flags=re.ASCII)
            yield GaugeMetricFamily(name, "See docs/metrics.md.", value)
        if stats is None:
            return
        text = "Rows of the batch's steps, by what became of them."
        rows = CounterMetricFamily("ppo_rows", text, labels=["status"])
        for status, count in {"OK": stats.valid_rows, **stats.invalid_rows}.items():
            rows.add_metric([status], count)
        yield rows
        text = "What each lane to the envs has counted: restarts, resends and more."
        events = CounterMetricFamily("ppo_lane_events", text, labels=["lane", "event"])
        for lane, counts in stats.lanes.items():
            for event, count in counts.items():
                events.add_metric([lane, event], count)
        yield events
        text = "How long the last 1,024 batch steps took."
        latency = GaugeMetricFamily("ppo_batch_seconds", text, labels=["quantile"])
        for quantile, seconds in stats.latency_seconds.items():
            latency.add_metric([quantile], seconds)
        yield latency
