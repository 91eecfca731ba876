"""What a server has counted, as Prometheus names it; docs/metrics-of-servers.md."""

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
#: Of labels, the values that are told even if there was none.
_LABELS: Final = {
    "rows": ("status", _STATUSES),
    "faults": ("kind", _STATUSES[1:]),
    "refusals": ("code", ()),
}
#: Fields of a status by the names of metrics; a counter's ends in `_total`.
_METRICS: Final = {
    "env_steps_total": ("steps", "Env steps that gave a valid row."),
    "env_resets_total": ("resets", "Resets of envs."),
    "worker_restarts_total": ("restarts", "Workers that were replaced."),
    "failures_total": ("failures", "Messages and leases that met a defect of ours."),
    "received_messages_total": ("messages_in", "Messages that came."),
    "sent_messages_total": ("messages_out", "Messages that left."),
    "received_bytes_total": ("bytes_in", "Bytes of messages that came."),
    "sent_bytes_total": ("bytes_out", "Bytes of messages that left."),
    "resent_answers_total": ("resends", "Answers that were given again."),
    "dropped_messages_total": ("dropped", "Answers not sent, messages not handled."),
    "rows_total": ("rows", "Rows of steps, by what became of them."),
    "faults_total": ("faults", "Faults of envs and workers."),
    "refusals_total": ("refusals", "Requests that were answered by an ERROR."),
    "batch_seconds": ("batch_seconds", "Steps of blocks, until their rows are there."),
    "env_step_seconds": ("env_step_seconds", "Env steps, shares of their blocks'."),
    "reset_seconds": ("reset_seconds", "Resets of envs."),
    "uptime_seconds": ("seconds", "Since the server started."),
    "envs": ("total_envs", "Envs that all leases may have together."),
    "free_envs": ("free_envs", "Envs that can be leased now."),
    "leases": ("num_leases", "Leases that are granted."),
    "rows_in_flight": ("in_flight", "Rows that are being stepped, reset or called."),
    "starting": ("is_starting", "1 while workers cannot be started yet."),
    "draining": ("is_draining", "1 while no new leases are granted."),
}
#: Of who knocks at the sockets, which is told here only.
_ATTACKS: Final = {
    "refused_keys_total": "Keys that were not let in: nobody's, or not now.",
    "reopened_total": "Times that all connections were closed, to be made anew.",
}


class ServerCollector:
    """Collects metrics from a server's status, which it asks for each time."""

    def __init__(
        self,
        ask: Callable[[], ServerStatus],
        attacks: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`attacks` has those counts that no status has, by their names."""
        self._ask = ask
        self._attacks = attacks

    def collect(self) -> Iterator[Metric]:
        """Returns all metrics; no name of a user is among them."""
        status, attacks = self._ask(), self._attacks()
        yield InfoMetricFamily("envserve", "The server.", {"version": status.version})
        for short, (field, text) in _METRICS.items():
            name, value = f"envserve_{short}", getattr(status, field)
            if field in _LABELS:
                label, known = _LABELS[field]
                family = CounterMetricFamily(name, text, labels=[label])
                for key, count in (dict.fromkeys(known, 0) | value).items():
                    family.add_metric([key], count)
                yield family
            elif isinstance(value, Histogram):
                bounds = [*map(str, value.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                yield HistogramMetricFamily(name, text, buckets, value.sum)
            elif short.endswith("_total"):
                yield CounterMetricFamily(name, text, value)
            else:
                yield GaugeMetricFamily(name, text, value)
        for short, text in _ATTACKS.items():
            yield CounterMetricFamily(f"envserve_{short}", text, attacks.get(short, 0))
        lag, away = status.loop_lag_ms / 1000, sum(len(x.absent) for x in status.leases)
        text = "How late the serving loop was within the last 10 s, at worst."
        yield GaugeMetricFamily("envserve_loop_lag_seconds", text, lag)
        text = "Rows whose envs are away."
        yield GaugeMetricFamily("envserve_absent_rows", text, away)
