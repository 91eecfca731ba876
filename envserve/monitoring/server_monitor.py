"""Looks at many servers at once: who is silent keeps nobody waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import to_builtins

from envserve.client.link.connection import ask_welcome
from envserve.client.link.discovery import resolve
from envserve.errors import ConnectError, EnvserveError, ProtocolMismatch
from envserve.monitoring.observer import Observer
from envserve.wire.sockets import raise_file_limit
from envserve.wire.status import Histogram, ServerStatus

__all__ = ["Sight", "look_at", "sights_of"]

_SAID_BY_OLD = ("total_envs", "free_envs", "is_starting", "is_draining", "loop_lag_ms")


class Sight:
    """One server, as it was seen last.

    Attributes:
      address: Where it is.
      name: The same, as short as can be.
      status: What it has said; without a version from one that is too old to be asked,
        and tells no more than its envs. None if it has said nothing.
      error: Why it has not.
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
        """Env steps since the look before; None if there was none."""
        now, before = self.status, self._before
        if not (now and before and now.version and now.seconds > before.seconds):
            return None
        return (now.steps - before.steps) / (now.seconds - before.seconds)

    @property
    def env_step_seconds(self) -> Histogram:
        """Those since the look before, if there were any; else all."""
        now = self.status or ServerStatus()
        late = now.env_step_seconds - (self._before or ServerStatus()).env_step_seconds
        return late if late.count else now.env_step_seconds

    def plain(self) -> dict[str, Any]:
        """Returns all of it, fit for JSON."""
        return {
            "address": self.address,
            "error": self.error or None,
            "steps_per_second": self.steps_per_second,
            "status": to_builtins(self.status),
        }

    def look(self, timeout_seconds: float) -> None:
        """Asks the server anew."""
        self._before, self.status, self.error = self.status, None, ""
        address, insecure = self.address, self._insecure
        try:
            try:
                if self._observer is None:
                    self._observer = Observer(address, insecure=insecure)
                self.status = self._observer.status(timeout_seconds)
            except ProtocolMismatch:
                old = ask_welcome(address, timeout_seconds, insecure=insecure)
                known = {name: getattr(old, name) for name in _SAID_BY_OLD}
                self.status = ServerStatus(**known)
        except EnvserveError as error:
            self.error = str(error).removeprefix(f"{address}: ")

    def close(self) -> None:
        """Lets go of the connection."""
        if self._observer is not None:
            self._observer.close()


@contextlib.contextmanager
def sights_of(words: Sequence[str], *, insecure: bool) -> Iterator[list[Sight]]:
    """Gives a sight of each server that words stand for, nobody looked at yet."""
    raise_file_limit()  # a connection takes nine
    sights: list[Sight] = []
    for word in words:
        try:
            sights += [Sight(address, insecure) for address in resolve(word)]
        except ConnectError as error:
            sights.append(Sight(word, insecure, str(error)))
    try:
        yield sights
    finally:
        for sight in sights:
            sight.close()


def look_at(
    sights: Sequence[Sight], timeout_seconds: float, gap_seconds: float | None = None
) -> None:
    """Asks all of them at the same time; after a gap once more who has answered."""

    def look(sight: Sight) -> None:
        sight.look(timeout_seconds)
        if gap_seconds is not None and sight.status is not None:
            time.sleep(gap_seconds)  # over which speed is measured
            sight.look(timeout_seconds)

    known = [sight for sight in sights if sight.is_known]
    with ThreadPoolExecutor(max(1, len(known))) as threads:
        list(threads.map(look, known))
