"""The status of a server: counters, which never decrease, and gauges (STATUS_RESULT).

The status of a lease is sent only to clients that may see the lease. The whole status
is limited to 64 KiB: if there are many leases, fewer episodes of each are listed, and
the last leases may be omitted.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field
from msgspec.structs import force_setattr, replace

from envserve.text import Name, one_line
from envserve.wire.constants import MAX_STATUS_BYTES
from envserve.wire.handshake import U63, Body, Milliseconds, Row, Seconds, Welcome

_ByName = Annotated[dict[Name, U63], Meta(max_length=64)]


class Histogram(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A histogram of durations.

    Attributes:
      bounds: Upper bounds in seconds, ascending.
      counts: Number of durations up to each bound and above the previous one; the last
        count is for durations above all bounds.
      sum: Sum of all durations in seconds.
    """

    bounds: Annotated[tuple[Seconds, ...], Meta(max_length=64)] = ()
    counts: Annotated[tuple[U63, ...], Meta(max_length=65)] = (0,)
    sum: Seconds = 0.0

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float | None:
        """Estimate a quantile in seconds, by linear interpolation between bounds.

        Args:
          fraction: Fraction of durations below the quantile; 0.5 for the median.

        Returns:
          The estimate; the largest bound if the quantile is above it; None if there are
          no durations.
        """
        rank, low = fraction * self.count, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and rank <= count:
                return low + (bound - low) * rank / count
            rank, low = rank - count, bound
        return low if self.count else None

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Return the durations that were added since an earlier state of the histogram.

        If the server was restarted in between, return all durations.
        """
        pairs = zip(self.counts, earlier.counts, strict=False)
        counts = tuple(current - previous for current, previous in pairs)
        if self.bounds != earlier.bounds or min(counts, default=0) < 0:
            return self
        total = max(0.0, self.sum - earlier.sum)
        return Histogram(bounds=self.bounds, counts=counts, sum=total)


class _Counts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that `LeaseStatus` and `ServerStatus` have in common.

    Attributes:
      steps: Number of env steps that produced a valid row.
      rows: Maps names of statuses to numbers of rows of steps.
      restarts: Number of workers that were replaced.
      faults: Maps names of statuses to numbers of faults.
      batch_seconds: Durations of the steps of blocks.
      in_flight: Number of rows with an operation in progress.
      seconds: Time since the start of the server, or since the lease was requested.
    """

    steps: U63 = 0
    rows: _ByName = field(default_factory=dict)
    restarts: U63 = 0
    faults: _ByName = field(default_factory=dict)
    batch_seconds: Histogram = Histogram()
    in_flight: U63 = 0
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        """Escape unprintable characters, because a peer may have written the texts."""
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), str):
                force_setattr(self, name, one_line(value))
            elif isinstance(value, dict) and not all(map(str.isprintable, value)):
                escaped = {one_line(key): count for key, count in value.items()}
                force_setattr(self, name, escaped)


class LeaseStatus(_Counts, frozen=True, kw_only=True, omit_defaults=True):
    """Status of one lease since it was granted.

    Attributes:
      number: Number of the lease in the server's log, as in "lease 3".
      user: User that holds the lease; "" on servers without keys.
      client: The user, and the name that the client has given itself.
      env_seconds: Total time in seconds that workers have spent in steps.
      absent: Rows whose envs are absent, at most 1,024.
      num_episodes: Number of complete episodes that ended while a client observed the
        lease.
      episodes: The most recent episodes: (serial number from 1, row, return, length).
      num_recoveries: Number of times a row recovered after its env was lost.
      recoveries: The most recent recoveries: (serial number from 1, row, milliseconds
        of absence).
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
    """Status of a server since it started, and of its leases.

    `Welcome` describes the fields that it has too.

    Attributes:
      version: Release of the server; "" if the server does not support STATUS.
      commit: Commit from which the release was built; may be empty.
      host: Name of the server's host.
      pid: Id of the server's process.
      num_workers: Maximum number of workers of a lease.
      resets: Number of env resets.
      env_step_seconds: Durations of env steps.
      reset_seconds: Durations of env resets.
      failures: Number of messages and leases that failed because of a bug.
      refusals: Maps names of error codes to numbers of ERRORs sent.
      messages_in: Number of messages received.
      messages_out: Number of messages sent.
      bytes_in: Number of bytes in received messages.
      bytes_out: Number of bytes in sent messages.
      resends: Number of replies that were sent again.
      dropped: Number of replies that could not be sent, plus unprocessed messages.
      num_leases: Number of leases that the client may see.
      leases: As many of these leases as fit.
    """

    version: Name = ""
    commit: Name = ""
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
        """Return the body, with as many leases as fit."""
        body = super().encode()
        if len(body) <= MAX_STATUS_BYTES:
            return body
        return replace(self, leases=self.leases[: len(self.leases) // 2]).encode()


def welcome_fields(welcome: Welcome) -> dict[str, Any]:
    """Return the fields of a `ServerStatus` that WELCOME has too."""
    names = ("total_envs", "free_envs", "is_starting", "is_draining", "loop_lag_ms")
    return {name: getattr(welcome, name) for name in names}
