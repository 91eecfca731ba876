"""STATUS: what a server is doing, in numbers. Counters only grow; gauges are of now.

A server counts for itself; a lease's numbers go only to who may see it. All of it fits
into 64 KiB: of many leases fewer episodes are told, and of too many the last ones not.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field
from msgspec.structs import force_setattr, replace

from envserve.text import Name, one_line
from envserve.wire.constants import MAX_STATUS_BYTES
from envserve.wire.handshake import U63, Body, Milliseconds, Row, Seconds

__all__ = ["Histogram", "LeaseStatus", "ServerStatus"]

_ByName = Annotated[dict[Name, U63], Meta(max_length=64)]


class Histogram(Body, frozen=True, kw_only=True, omit_defaults=True):
    """How many durations lay within which bounds.

    Attributes:
      bounds: Seconds, ascending; a duration is counted at the first bound above it.
      counts: For each bound, and last for what lies above all.
      sum: Of all durations, in seconds.
    """

    bounds: Annotated[tuple[Seconds, ...], Meta(max_length=64)] = ()
    counts: Annotated[tuple[U63, ...], Meta(max_length=65)] = (0,)
    sum: Seconds = 0.0

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Estimates how long that share of them took at most; None if there is none.

        Within two bounds they are taken for evenly spread.
        """
        wanted, low = share * self.count, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and wanted <= count:
                return low + (bound - low) * wanted / count
            wanted, low = wanted - count, bound
        return low if self.count else None

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Returns what was added since; of another start of the server, all."""
        pairs = zip(self.counts, earlier.counts, strict=False)
        counts = tuple(now - before for now, before in pairs)
        if self.bounds != earlier.bounds or min(counts, default=0) < 0:
            return self
        total = max(0.0, self.sum - earlier.sum)
        return Histogram(bounds=self.bounds, counts=counts, sum=total)


class _Counts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """What leases and servers both have; docs/protocol.md says what it means."""

    steps: U63 = 0
    rows: _ByName = field(default_factory=dict)
    restarts: U63 = 0
    faults: _ByName = field(default_factory=dict)
    batch_seconds: Histogram = Histogram()
    in_flight: U63 = 0
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        """Makes texts fit to be shown."""
        for name in self.__struct_fields__:
            if isinstance(found := getattr(self, name), str):
                force_setattr(self, name, one_line(found))
            elif isinstance(found, dict) and not all(map(str.isprintable, found)):
                shown = {one_line(key): count for key, count in found.items()}
                force_setattr(self, name, shown)


class LeaseStatus(_Counts, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one lease's envs since it was granted.

    Attributes:
      number: As in the server's log: "lease 3".
      user: Whose it is; "" where users are not known.
      client: The user, and what the client calls itself.
      env_seconds: That workers have spent in steps, all together.
      absent: Rows whose envs are away, the first 1,024 of them.
      num_episodes: Episodes that ended whole while somebody watched.
      episodes: The last of those: (serial from 1 on, row, return, length).
      num_recoveries: Rows that came back after their envs were lost.
      recoveries: The last of those: (serial from 1 on, row, milliseconds away).
    """

    number: U63
    user: Name = ""
    client: Annotated[str, Meta(max_length=500)] = ""
    env_name: Name = ""
    num_envs: U63 = 0
    env_seconds: Seconds = 0.0
    absent: Annotated[tuple[Row, ...], Meta(max_length=1024)] = ()
    num_episodes: U63 = 0
    episodes: Annotated[
        tuple[tuple[U63, Row, float, U63], ...], Meta(max_length=256)
    ] = ()
    num_recoveries: U63 = 0
    recoveries: Annotated[
        tuple[tuple[U63, Row, Milliseconds], ...], Meta(max_length=64)
    ] = ()


class ServerStatus(_Counts, frozen=True, kw_only=True, omit_defaults=True):
    """What a server is and has done since it started, and the leases in it.

    Who asks sees `num_leases` of them; `leases` are as many as there is room for. What
    a `Welcome` has too is of the asker. A server that does not tell has no version.
    """

    version: Name = ""
    host: Name = ""
    pid: U63 = 0
    num_workers: U63 = 0
    total_envs: U63 = 0
    free_envs: U63 = 0
    is_starting: bool = False
    is_draining: bool = False
    loop_lag_ms: Milliseconds = 0
    resets: U63 = 0
    env_step_seconds: Histogram = Histogram()
    reset_seconds: Histogram = Histogram()
    failures: U63 = 0
    refusals: _ByName = field(default_factory=dict)
    messages_in: U63 = 0
    messages_out: U63 = 0
    bytes_in: U63 = 0
    bytes_out: U63 = 0
    resends: U63 = 0
    dropped: U63 = 0
    num_leases: U63 = 0
    leases: Annotated[tuple[LeaseStatus, ...], Meta(max_length=1024)] = ()

    def encode(self) -> bytes:
        """Returns the body, with as many leases as there is room for."""
        body = super().encode()
        if len(body) <= MAX_STATUS_BYTES:
            return body
        return replace(self, leases=self.leases[: len(self.leases) // 2]).encode()
