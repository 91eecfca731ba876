"""What a server says about itself: to STATUS, and to who scrapes its metrics.

It is made anew at most ten times a second, however often it is asked for, and then once
for each user who asks: what others have, nobody learns.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Final

from msgspec.structs import replace

from envserve.monitoring.metrics_port import MetricsPort
from envserve.pool.pool_metrics import add, status_fields
from envserve.server.event_loop import RouterShell
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings
from envserve.wire.status import ServerStatus

__all__ = ["StatusBoard"]

#: Between two fresh answers.
_SECONDS: Final = 0.1
#: How long who reads metrics waits for the serving loop.
_PATIENCE_SECONDS: Final = 5.0
#: Of all leases together.
_MAX_EPISODES: Final = 512


class StatusBoard:
    """Sums up what a server's shell, session and pools have counted."""

    def __init__(
        self,
        host: HostSettings,
        session: ServerSession,
        shell: RouterShell,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Answers STATUS from now on."""
        self._loop = loop
        self._known: dict[str, Any] = {
            "version": version("envserve"),
            "host": platform.node(),
            "pid": os.getpid(),
            "num_workers": host.num_workers,
        }
        self._session = session
        self._shell = shell
        self._started_at = loop.time()
        self._made_at = -math.inf
        self._totals = ServerStatus()
        self._bodies: dict[str, bytes] = {}
        session.questions.report = self.report

    def report(self, user: str, now: float) -> bytes:
        """Returns the body of a STATUS_RESULT; that of a moment ago if there is one."""
        self._refresh(now)
        body = self._bodies.get(user)
        if body is None:
            for claim in self._session.claims.seen_by(user):
                if (leased := self._shell.pools.get(claim.session)) is not None:
                    leased.pool.metrics.watch(now)
            body = self._bodies[user] = self._told_to(user, now).encode()
        return body

    def show_at(
        self, port: MetricsPort, attacks: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Shows metrics at a port from now on; `attacks` as of `ServerCollector`."""
        from envserve.server.metrics import ServerCollector

        async def ask() -> ServerStatus:
            self._refresh(now := self._loop.time())
            return self._told_to("local", now)

        def wait() -> ServerStatus:
            asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
            return asked.result(_PATIENCE_SECONDS)

        port.show(ServerCollector(wait, attacks))

    def _refresh(self, now: float) -> None:
        """Sums all leases up, unless that was done a moment ago."""
        if now < self._made_at + _SECONDS:
            return
        self._made_at = now
        self._bodies.clear()
        session, shell = self._session, self._shell
        pools = [leased.pool for leased in shell.pools.values()]
        counts = add([shell.past_counts, *(pool.metrics.counts for pool in pools)])
        self._totals = ServerStatus(
            **self._known,
            **status_fields(counts),
            seconds=now - self._started_at,
            in_flight=sum(pool.inspector.num_in_flight for pool in pools),
            failures=shell.failures,
            refusals=dict(session.refusals),
            messages_in=shell.messages_in,
            messages_out=shell.messages_out,
            bytes_in=shell.bytes_in,
            bytes_out=shell.bytes_out,
            resends=shell.resends,
            dropped=shell.num_dropped,
        )

    def _told_to(self, user: str, now: float) -> ServerStatus:
        """Returns what one user may know."""
        session, pools = self._session, self._shell.pools
        seen = session.claims.seen_by(user)
        leases = [
            pools[claim.session].pool.inspector.status(
                max(1, _MAX_EPISODES // len(seen)),
                number=claim.number,
                user=claim.user,
                client=claim.client,
                seconds=now - claim.since,
            )
            for claim in seen
            if claim.session in pools
        ]
        welcome = session.claims.welcome(user, session.check_health())
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
