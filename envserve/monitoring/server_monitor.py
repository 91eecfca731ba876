"""Poll many servers concurrently; a silent server does not delay the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import to_builtins

from envserve.client.link.discovery import resolve
from envserve.client.link.probe import request_welcome
from envserve.errors import ConnectError, EnvserveError, ProtocolMismatch
from envserve.monitoring.observer import Observer
from envserve.wire.sockets import raise_file_limit
from envserve.wire.status import Histogram, ServerStatus

#: What servers that do not know STATUS report in their WELCOME.
_IN_WELCOME = ("total_envs", "free_envs", "is_starting", "is_draining", "loop_lag_ms")


class MonitoredServer:
    """One server and its latest status.

    Attributes:
      address: Address of the server.
      name: The address without `tcp://`.
      status: The latest status, None without an answer. That of a server too old for
        STATUS has no version, and the fields of a WELCOME only.
      error: Why there is no status.
      is_known: Whether there is an address.
    """

    def __init__(self, address: str, insecure: bool, error: str = "") -> None:
        self.name = address.removeprefix("tcp://")
        self.status: ServerStatus | None = None
        self.error, self.is_known = error, not error
        self.address, self._insecure = address, insecure
        self._before: ServerStatus | None = None
        self._observer: Observer | None = None

    @property
    def steps_per_second(self) -> float | None:
        """Env steps per second since the poll before; None at the first poll."""
        now, before = self.status, self._before
        if not (now and before and now.version and now.seconds > before.seconds):
            return None
        return (now.steps - before.steps) / (now.seconds - before.seconds)

    @property
    def env_step_seconds(self) -> Histogram:
        """Durations of env steps since the poll before; of all if there were none."""
        now = self.status or ServerStatus()
        late = now.env_step_seconds - (self._before or ServerStatus()).env_step_seconds
        return late if late.count else now.env_step_seconds

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {
            "address": self.address,
            "error": self.error or None,
            "steps_per_second": self.steps_per_second,
            "status": to_builtins(self.status),
        }

    def poll(self, timeout_seconds: float) -> None:
        """Request the server's status."""
        self._before, self.status, self.error = self.status, None, ""
        address, insecure = self.address, self._insecure
        try:
            try:
                if self._observer is None:
                    self._observer = Observer(address, insecure=insecure)
                self.status = self._observer.status(timeout_seconds)
            except ProtocolMismatch:
                old = request_welcome(address, timeout_seconds, insecure=insecure)
                known = {name: getattr(old, name) for name in _IN_WELCOME}
                self.status = ServerStatus(**known)
        except EnvserveError as error:
            self.error = str(error).removeprefix(f"{address}: ")

    def close(self) -> None:
        """Close the connection."""
        if self._observer is not None:
            self._observer.close()


@contextlib.contextmanager
def monitored_servers(
    words: Sequence[str], *, insecure: bool
) -> Iterator[list[MonitoredServer]]:
    """Yield the servers that these words resolve to, none of them polled yet."""
    raise_file_limit()  # a connection takes nine
    servers: list[MonitoredServer] = []
    for word in words:
        try:
            servers += [MonitoredServer(address, insecure) for address in resolve(word)]
        except ConnectError as error:
            servers.append(MonitoredServer(word, insecure, str(error)))
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def poll_servers(
    servers: Sequence[MonitoredServer],
    timeout_seconds: float,
    gap_seconds: float | None = None,
) -> None:
    """Poll all servers concurrently; after a gap once more those that have answered."""

    def poll(server: MonitoredServer) -> None:
        server.poll(timeout_seconds)
        if gap_seconds is not None and server.status is not None:
            time.sleep(gap_seconds)  # over which speed is measured
            server.poll(timeout_seconds)

    known = [server for server in servers if server.is_known]
    with ThreadPoolExecutor(max(1, len(known))) as threads:
        list(threads.map(poll, known))
