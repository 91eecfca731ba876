"""Serve the metrics of a training run to Prometheus over HTTP."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from envserve.client import BatchStats
from envserve.monitoring.metrics_port import MetricsPort

if TYPE_CHECKING:
    from prometheus_client import Metric

#: Names of the metrics that are not in the rows of a run, and of the families to which
#: their counters belong: a counter `x_total` belongs to the family `x`.
_OTHER_METRICS: Final = (
    *("ppo_env_steps", "ppo_env_steps_total", "ppo_rows", "ppo_rows_total"),
    *("ppo_lane_events", "ppo_lane_events_total", "ppo_batch_seconds"),
)


class TrainerMetrics(MetricsPort):
    """Serves the latest row of metrics and the statistics of the envs over HTTP.

    See `MetricsPort` for the arguments.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(port, host)
        self._latest: tuple[int, Mapping[str, float], BatchStats | None] = (0, {}, None)
        self.start_serving(self)

    def update(self, steps: int, row: Mapping[str, float], stats: BatchStats) -> None:
        """Replace the served values.

        Args:
          steps: Env steps of the run so far.
          row: Maps the names of metrics to their values.
          stats: Statistics of the envs.
        """
        self._latest = steps, dict(row), stats

    def collect(self) -> Iterator["Metric"]:
        """Yield a gauge `ppo_NAME` per value of the newest row, and env statistics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        steps, row, stats = self._latest
        yield CounterMetricFamily("ppo_env_steps", "Env steps of this run.", steps)
        text = "See 'Training metrics' in the docs."
        for exported, name in _unique_names(row).items():
            yield GaugeMetricFamily(exported, text, row[name])
        if stats is None:
            return
        text = "Rows of all batch steps, by status."
        rows = CounterMetricFamily("ppo_rows", text, labels=["status"])
        for status, count in {"OK": stats.valid_rows, **stats.invalid_rows}.items():
            rows.add_metric([status], count)
        yield rows
        text = "Events of each lane, such as restarts and resends."
        events = CounterMetricFamily("ppo_lane_events", text, labels=["lane", "event"])
        for lane, counts in stats.lanes.items():
            for event, count in counts.items():
                events.add_metric([lane, event], count)
        yield events
        text = "Duration of the last 1,024 batch steps, in seconds."
        latency = GaugeMetricFamily("ppo_batch_seconds", text, labels=["quantile"])
        for quantile, seconds in stats.latency_seconds.items():
            latency.add_metric([quantile], seconds)
        yield latency


def _unique_names(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from unique names of Prometheus metrics to names in a row.

    Other characters than letters, digits and `_` become `_`. If this results in the
    name of another metric, `_` is appended.
    """
    unique: dict[str, str] = {}
    for name in sorted(names, key=lambda x: (not re.fullmatch(r"\w+", x, re.A), x)):
        exported = re.sub(r"\W", "_", f"ppo_{name}", flags=re.ASCII)
        while exported in unique or exported in _OTHER_METRICS:
            exported += "_"
        unique[exported] = name
    return unique
