"""Poll many servers concurrently; an unresponsive server does not delay the others."""

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

__all__ = ["ServerSnapshot", "open_snapshots", "poll_servers"]

_WELCOME_FIELDS = (
    "total_envs",
    "free_envs",
    "is_starting",
    "is_draining",
    "loop_lag_ms",
)


class ServerSnapshot:
    """The status of one server at the last poll.

    Attributes:
      address: Address of the server.
      name: The address without "tcp://".
      status: The server's answer; None without one. A server of an old version only
        reports its envs, and no version.
      error: Why there is no answer.
      is_known: Whether the name was resolved to an address.
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
        """Env steps per second since the previous poll; None at the first one."""
        now, before = self.status, self._before
        if not (now and before and now.version and now.seconds > before.seconds):
            return None
        return (now.steps - before.steps) / (now.seconds - before.seconds)

    @property
    def env_step_seconds(self) -> Histogram:
        """Durations since the previous poll, if there are any; otherwise all."""
        now = self.status or ServerStatus()
        late = now.env_step_seconds - (self._before or ServerStatus()).env_step_seconds
        return late if late.count else now.env_step_seconds

    def plain(self) -> dict[str, Any]:
        """Return the snapshot as plain values, for JSON."""
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
                known = {name: getattr(old, name) for name in _WELCOME_FIELDS}
                self.status = ServerStatus(**known)
        except EnvserveError as error:
            self.error = str(error).removeprefix(f"{address}: ")

    def close(self) -> None:
        """Close the connection."""
        if self._observer is not None:
            self._observer.close()


@contextlib.contextmanager
def open_snapshots(
    words: Sequence[str], *, insecure: bool
) -> Iterator[list[ServerSnapshot]]:
    """Yield a snapshot for each server that words stand for, not polled yet."""
    raise_file_limit()  # a connection takes nine
    snapshots: list[ServerSnapshot] = []
    for word in words:
        try:
            snapshots += [
                ServerSnapshot(address, insecure) for address in resolve(word)
            ]
        except ConnectError as error:
            snapshots.append(ServerSnapshot(word, insecure, str(error)))
    try:
        yield snapshots
    finally:
        for snapshot in snapshots:
            snapshot.close()


def poll_servers(
    snapshots: Sequence[ServerSnapshot],
    timeout_seconds: float,
    gap_seconds: float | None = None,
) -> None:
    """Poll all servers at the same time; after a gap poll those again that answered."""

    def poll(snapshot: ServerSnapshot) -> None:
        snapshot.poll(timeout_seconds)
        if gap_seconds is not None and snapshot.status is not None:
            time.sleep(gap_seconds)  # over which speed is measured
            snapshot.poll(timeout_seconds)

    known = [snapshot for snapshot in snapshots if snapshot.is_known]
    with ThreadPoolExecutor(max(1, len(known))) as threads:
        list(threads.map(poll, known))
