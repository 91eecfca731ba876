"""Sums up what a server has counted, for STATUS and for readers of its metrics.

The sum is computed at most ten times a second, however often it is asked for, and then
once for each user who asks: no user sees the leases of another.
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
from envserve.server.leased_pool import LeasedPool
from envserve.session.server.decisions import SessionId
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings
from envserve.wire.handshake import Welcome
from envserve.wire.status import ServerStatus

#: Seconds between two fresh answers.
_SECONDS: Final = 0.1
#: Seconds that a reader of metrics waits for the server's event loop.
_PATIENCE_SECONDS: Final = 5.0
#: Most episodes in an answer, of all leases together.
_MAX_EPISODES: Final = 512


@dataclass
class Counters:
    """Counts of a server's event loop; see `ServerStatus`, which has the same names."""

    failures: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    resends: int = 0
    dropped: int = 0


class StatusBoard:
    """Sums up what a server's event loop, session and pools have counted."""

    def __init__(
        self,
        host: HostSettings,
        session: ServerSession,
        pools: Mapping[SessionId, LeasedPool],
        counters: Counters,
        welcome: Callable[[str], Welcome],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._loop = loop
        self._known: dict[str, Any] = {
            "version": version("envserve"),
            "host": platform.node(),
            "pid": os.getpid(),
            "num_workers": host.num_workers,
        }
        self._session, self._pools, self._counters = session, pools, counters
        self._welcome = welcome
        self._past = sum_counts(())  # counts of pools that are closed
        self._started_at = loop.time()
        self._made_at = -math.inf
        self._totals = ServerStatus()
        self._bodies: dict[str, bytes] = {}

    def add_past(self, counts: Counts) -> None:
        """Keep what a pool has counted that is about to be closed."""
        self._past = sum_counts((self._past, counts))

    def report(self, user: str, now: float) -> bytes:
        """Return the body of a STATUS_RESULT for a user; it may be 0.1 s old."""
        self._refresh(now)
        body = self._bodies.get(user)
        if body is None:
            for record in self._session.leases.visible_to(user):
                if (leased := self._pools.get(record.session)) is not None:
                    leased.pool.metrics.watch(now)
            body = self._bodies[user] = self._status_for(user, now).encode()
        return body

    def show_at(
        self, port: MetricsPort, attacks: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Serve metrics at a port; `attacks` is the argument of `ServerCollector`."""
        from envserve.server.metrics import ServerCollector

        async def ask() -> ServerStatus:
            self._refresh(now := self._loop.time())
            return self._status_for("local", now)

        def wait() -> ServerStatus:
            asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
            return asked.result(_PATIENCE_SECONDS)

        port.start_serving(ServerCollector(wait, attacks))

    def _refresh(self, now: float) -> None:
        """Sum up all leases, unless that was done a moment ago."""
        if now < self._made_at + _SECONDS:
            return
        self._made_at = now
        self._bodies.clear()
        pools = [leased.pool for leased in self._pools.values()]
        counts = sum_counts([self._past, *(pool.metrics.counts for pool in pools)])
        self._totals = ServerStatus(
            **self._known,
            **status_fields(counts),
            seconds=now - self._started_at,
            in_flight=sum(pool.inspector.num_in_flight for pool in pools),
            refusals=dict(self._session.refusals),
            **vars(self._counters),
        )

    def _status_for(self, user: str, now: float) -> ServerStatus:
        """Return what one user may see."""
        pools, seen = self._pools, self._session.leases.visible_to(user)
        leases = [
            pools[record.session].pool.inspector.status(
                max(1, _MAX_EPISODES // len(seen)),
                number=record.number,
                user=record.user,
                client=record.client,
                seconds=now - record.attached_at,
            )
            for record in seen
            if record.session in pools
        ]
        welcome = self._welcome(user)
        return replace(
            self._totals,
            total_envs=welcome.total_envs,
            free_envs=welcome.free_envs,
            is_starting=welcome.is_starting,
            is_draining=welcome.is_draining,
            loop_lag_ms=welcome.loop_lag_ms,
            num_leases=len(leases),
            leases=tuple(leases),
        )
