"""A server's metrics for Prometheus, as listed in "Server metrics" in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from envserve.slab import Status
from envserve.wire.status import Histogram, ServerStatus

_STATUSES: Final = tuple(s.name for s in Status if s <= Status.TIMEOUT)
#: For each field that is a dict of counts: the metric's label, and the values of the
#: label that are always reported.
_LABELLED_FIELDS: Final = {
    "rows": ("status", _STATUSES),
    "faults": ("kind", _STATUSES[1:]),
    "refusals": ("code", ()),
}
#: Field of `ServerStatus` and help text, by metric; counters end in `_total`.
_METRICS: Final = {
    "env_steps_total": ("steps", "Env steps that returned a valid row."),
    "env_resets_total": ("resets", "Resets of envs."),
    "worker_restarts_total": ("restarts", "Workers that were replaced."),
    "failures_total": ("failures", "Messages and leases that failed due to a bug."),
    "received_messages_total": ("messages_in", "Received messages."),
    "sent_messages_total": ("messages_out", "Sent messages."),
    "received_bytes_total": ("bytes_in", "Bytes of received messages."),
    "sent_bytes_total": ("bytes_out", "Bytes of sent messages."),
    "resent_answers_total": ("resends", "Replies that were resent."),
    "dropped_messages_total": ("dropped", "Unsent replies and unprocessed messages."),
    "rows_total": ("rows", "Rows returned by steps, by status."),
    "faults_total": ("faults", "Faults of envs and workers, by kind."),
    "refusals_total": ("refusals", "ERROR messages sent, by code."),
    "batch_seconds": ("batch_seconds", "Time until all rows of a step are ready."),
    "env_step_seconds": (
        "env_step_seconds",
        "Time per env step, averaged over a block.",
    ),
    "reset_seconds": ("reset_seconds", "Time per env reset."),
    "uptime_seconds": ("seconds", "Seconds since the server started."),
    "envs": ("total_envs", "Maximum number of envs over all leases."),
    "free_envs": ("free_envs", "Envs that can be leased now."),
    "leases": ("num_leases", "Current leases."),
    "rows_in_flight": ("in_flight", "Rows that are being stepped, reset or called."),
    "starting": ("is_starting", "1 while workers cannot be started yet."),
    "draining": ("is_draining", "1 while no new leases are granted."),
}
#: Help text of each metric about connections, which `ServerStatus` does not contain.
_CONNECTION_METRICS: Final = {
    "refused_keys_total": "Connections rejected because of their key.",
    "reopened_total": "Number of times that all connections were closed.",
}


class ServerCollector:
    """Prometheus collector that requests a new `ServerStatus` for each scrape."""

    def __init__(
        self,
        get_status: Callable[[], ServerStatus],
        connection_counts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Create a collector.

        Args:
          get_status: Returns the current status; called in the scraper's thread.
          connection_counts: Returns the values of `_CONNECTION_METRICS`, by metric.
        """
        self._get_status = get_status
        self._connection_counts = connection_counts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, without user names, because scraping needs no key."""
        status, connections = self._get_status(), self._connection_counts()
        yield InfoMetricFamily(
            "envserve", "Version of the server.", {"version": status.version}
        )
        for metric, (field, text) in _METRICS.items():
            name, value = f"envserve_{metric}", getattr(status, field)
            if field in _LABELLED_FIELDS:
                label, keys = _LABELLED_FIELDS[field]
                family = CounterMetricFamily(name, text, labels=[label])
                for key, count in (dict.fromkeys(keys, 0) | value).items():
                    family.add_metric([key], count)
                yield family
            elif isinstance(value, Histogram):
                bounds = [*map(str, value.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                yield HistogramMetricFamily(name, text, buckets, value.sum)
            elif metric.endswith("_total"):
                yield CounterMetricFamily(name, text, value)
            else:
                yield GaugeMetricFamily(name, text, value)
        for metric, text in _CONNECTION_METRICS.items():
            value = connections.get(metric, 0)
            yield CounterMetricFamily(f"envserve_{metric}", text, value)
        lag = status.loop_lag_ms / 1000
        text = "Largest delay of the event loop in the last 10 s."
        yield GaugeMetricFamily("envserve_loop_lag_seconds", text, lag)
        num_absent = sum(len(lease.absent) for lease in status.leases)
        text = "Rows without an env, because their worker is being replaced."
        yield GaugeMetricFamily("envserve_absent_rows", text, num_absent)
