"""Sums up the counts of a server, for STATUS requests and for Prometheus.

The totals are computed at most ten times a second. Each user gets a separate report,
because users may only see their own leases. The report is cached until the totals are
computed again.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from msgspec.structs import replace

from envserve.monitoring.metrics_port import MetricsPort
from envserve.pool.pool_metrics import Counts, status_fields, sum_counts
from envserve.python_process import build_commit
from envserve.server.leased_pool import LeasedPool
from envserve.session.server.decisions import SessionId
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.wire.handshake import Welcome
from envserve.wire.status import ServerStatus, welcome_fields

#: Minimum seconds between two computations of the totals.
_REFRESH_SECONDS: Final = 0.1
#: Maximum seconds that a metrics scrape waits for the server's event loop.
_METRICS_TIMEOUT_SECONDS: Final = 5.0
#: Maximum number of episodes in one report, over all leases.
_MAX_EPISODES: Final = 512


@dataclass
class ServerCounters:
    """Counts of a server's event loop, named like the fields of `ServerStatus`."""

    failures: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    resends: int = 0
    dropped: int = 0


class StatusReporter:
    """Sums up the counts of a server's event loop, sessions and pools."""

    def __init__(
        self,
        settings: HostSettings,
        protocol: ServerProtocol,
        pools: Mapping[SessionId, LeasedPool],
        counters: ServerCounters,
        welcome: Callable[[str], Welcome],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._loop = loop
        self._constant_fields: dict[str, Any] = {
            "version": version("envserve"),
            "commit": build_commit(),
            "host": platform.node(),
            "pid": os.getpid(),
            "num_workers": settings.num_workers,
        }
        self._protocol, self._pools, self._counters = protocol, pools, counters
        self._welcome = welcome
        self._closed_counts = sum_counts(())  # counts of closed pools
        self._started_at = loop.time()
        self._refreshed_at = -math.inf
        self._totals = ServerStatus()
        self._bodies: dict[str, bytes] = {}

    def add_closed(self, counts: Counts) -> None:
        """Add the counts of a pool that is about to be closed."""
        self._closed_counts = sum_counts((self._closed_counts, counts))

    def report(self, user: str, now: float) -> bytes:
        """Return the body of a STATUS_RESULT for a user; it is at most 0.1 s old."""
        self._refresh(now)
        body = self._bodies.get(user)
        if body is None:
            for record in self._protocol.leases.visible_to(user):
                if (leased_pool := self._pools.get(record.session)) is not None:
                    leased_pool.pool.metrics.start_tracking(now)
            body = self._bodies[user] = self._status_for(user, now).encode()
        return body

    def export_to(
        self,
        port: MetricsPort,
        connection_counts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Serve metrics on a port; for `connection_counts` see `ServerCollector`."""
        from envserve.server.metrics import ServerCollector

        async def compute() -> ServerStatus:
            now = self._loop.time()
            self._refresh(now)
            return self._status_for("local", now)

        def get_status() -> ServerStatus:  # runs in the metrics port's thread
            future = asyncio.run_coroutine_threadsafe(compute(), self._loop)
            return future.result(_METRICS_TIMEOUT_SECONDS)

        port.start_serving(ServerCollector(get_status, connection_counts))

    def _refresh(self, now: float) -> None:
        """Compute the totals over all leases, unless they are less than 0.1 s old."""
        if now < self._refreshed_at + _REFRESH_SECONDS:
            return
        self._refreshed_at = now
        self._bodies.clear()
        pools = [leased_pool.pool for leased_pool in self._pools.values()]
        counts = sum_counts(
            [self._closed_counts, *(pool.metrics.counts for pool in pools)]
        )
        self._totals = ServerStatus(
            **self._constant_fields,
            **status_fields(counts),
            seconds=now - self._started_at,
            in_flight=sum(pool.num_rows_in_flight for pool in pools),
            refusals=dict(self._protocol.refusals),
            **vars(self._counters),
        )

    def _status_for(self, user: str, now: float) -> ServerStatus:
        """Return the server's totals, with only those leases that the user may see."""
        pools, visible = self._pools, self._protocol.leases.visible_to(user)
        leases = [
            pools[record.session].pool.status(
                max(1, _MAX_EPISODES // len(visible)),
                number=record.number,
                user=record.user,
                client=record.client,
                seconds=now - record.attached_at,
            )
            for record in visible
            if record.session in pools
        ]
        return replace(
            self._totals,
            **welcome_fields(self._welcome(user)),
            num_leases=len(leases),
            leases=tuple(leases),
        )
