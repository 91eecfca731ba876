"""Poll many servers concurrently; an unresponsive server does not delay the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from msgspec import to_builtins

from envserve.client.link.discovery import resolve
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import ConnectError, EnvserveError, ProtocolMismatch
from envserve.monitoring.observer import Observer
from envserve.wire.sockets import raise_file_limit
from envserve.wire.status import Histogram, ServerStatus, welcome_fields

#: Names of the items of tuples, by the field of a lease's status that lists them.
_NAMES: Final = {
    "episodes": ("number", "row", "return", "length"),
    "recoveries": ("number", "row", "milliseconds"),
}


class MonitoredServer:
    """One server and its latest status.

    Attributes:
      address: Address of the server.
      name: The address without `tcp://`.
      status: The reply to the last poll; None if the server did not reply. If the
        server is too old for STATUS, the field `version` is empty, and only the fields
        that WELCOME also has are set.
      error: The reason why the last poll got no reply; empty otherwise.
      is_resolved: Whether the address could be resolved; if not, the server is not
        polled.
    """

    def __init__(self, address: str, insecure: bool, error: str = "") -> None:
        self.name = address.removeprefix("tcp://")
        self.status: ServerStatus | None = None
        self.error, self.is_resolved = error, not error
        self.address, self._insecure = address, insecure
        self._previous: ServerStatus | None = None
        self._observer: Observer | None = None

    @property
    def steps_per_second(self) -> float | None:
        """The rate of env steps since the previous poll of the same server process.

        None after the first poll, and if the server was restarted between two polls.
        """
        now, previous = self.status, self._previous
        if not (now and previous and now.version and now.seconds > previous.seconds):
            return None
        if now.steps < previous.steps:  # restarted, but running longer than before
            return None
        return (now.steps - previous.steps) / (now.seconds - previous.seconds)

    @property
    def env_step_seconds(self) -> Histogram:
        """The durations of env steps since the previous poll.

        If there was no env step since the previous poll, or no previous poll, the
        histogram contains the durations of all env steps.
        """
        total = (self.status or ServerStatus()).env_step_seconds
        recent = total - (self._previous or ServerStatus()).env_step_seconds
        return recent if recent.count else total

    def as_dict(self) -> dict[str, Any]:
        """Return the address, error, speed and status as JSON-compatible values."""
        return {
            "address": self.address,
            "error": self.error or None,
            "steps_per_second": self.steps_per_second,
            "status": _readable(to_builtins(self.status)),
        }

    def poll(self, timeout_seconds: float) -> None:
        """Request the server's status, and set `status` or `error`."""
        self._previous, self.status, self.error = self.status, None, ""
        address, insecure = self.address, self._insecure
        try:
            try:
                if self._observer is None:
                    self._observer = Observer(address, insecure=insecure)
                self.status = self._observer.status(timeout_seconds)
            except ProtocolMismatch:  # the server is too old for STATUS
                old = request_welcome(address, timeout_seconds, insecure=insecure)
                self.status = ServerStatus(**welcome_fields(old))
        except EnvserveError as error:
            self.error = str(error).removeprefix(f"{address}: ")

    def close(self) -> None:
        """Close the connection."""
        if self._observer is not None:
            self._observer.close()


def _readable(value: Any, key: str = "") -> Any:
    """Replace the tuples of `_NAMES` by dicts; in all dicts, put nested values last."""
    if isinstance(value, Mapping):
        items = ((name, _readable(part, name)) for name, part in value.items())
        return dict(sorted(items, key=lambda item: isinstance(item[1], dict | list)))
    if isinstance(value, list | tuple):
        if names := _NAMES.get(key):
            return [dict(zip(names, part, strict=True)) for part in value]
        return [_readable(part) for part in value]
    return value


@contextlib.contextmanager
def monitored_servers(
    addresses: Sequence[str], *, insecure: bool
) -> Iterator[list[MonitoredServer]]:
    """Resolve addresses, and yield their servers, which have not been polled yet.

    An address that cannot be resolved becomes a server with `is_resolved` False.
    """
    raise_file_limit()  # each connection needs nine file descriptors
    servers: list[MonitoredServer] = []
    for word in addresses:
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
    """Poll all servers concurrently, once or twice.

    Args:
      servers: The servers; unresolved servers are skipped.
      timeout_seconds: Maximum time to wait for each reply.
      gap_seconds: Pause before servers that replied are polled again, to measure
        their speed; None to poll only once.
    """

    def poll(server: MonitoredServer) -> None:
        server.poll(timeout_seconds)
        if gap_seconds is not None and server.status is not None:
            time.sleep(gap_seconds)
            server.poll(timeout_seconds)

    resolved = [server for server in servers if server.is_resolved]
    with ThreadPoolExecutor(max(1, len(resolved))) as threads:
        list(threads.map(poll, resolved))
