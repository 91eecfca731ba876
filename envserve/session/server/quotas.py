"""Quotas of users: allowed envs, resource limits, and the maximum rate of new leases.

The name of a client's key identifies its user. A client without a key is the user
"local" or "", to whom only the host's limits apply. The grant of a key can lower the
host's limits, but not raise them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from envserve.keys.grant import Grant
from envserve.session.server.permissions import (
    OverQuota,
    RateLimited,
    Rejection,
    check_kwargs,
    restrict,
)
from envserve.settings import HostSettings
from envserve.wire.bodies import Attach
from envserve.wire.constants import ErrorCode

#: Names of users without a key.
KEYLESS_USERS: Final = frozenset({"", "local"})
#: With one key, a user can create this many leases per second, in bursts of up to
#: `_MAX_ATTACH_BURST`. The rate is limited because each lease forks processes.
_ATTACHES_PER_SECOND: Final = 2
_MAX_ATTACH_BURST: Final = 8


class Usage(NamedTuple):
    """Numbers of envs, worker processes and leases: used, requested or allowed."""

    envs: int = 0
    processes: int = 0
    leases: int = 0

    @classmethod
    def requested_by(cls, attach: Attach, host: HostSettings) -> Usage:
        """Return the resources that an ATTACH message requests."""
        max_blocks = attach.num_envs // min(attach.num_splits, attach.num_envs)
        count = min(host.num_workers, attach.blocks_per_split or max_blocks, max_blocks)
        return cls(attach.num_hosted, count, 1)

    @classmethod
    def limit_of(cls, host: HostSettings) -> Usage:
        """Return the limits of a server, for all users together."""
        return cls(host.total_envs, host.total_processes, host.total_envs)


@dataclass(frozen=True)
class Quota:
    """Permissions and limits of one user.

    Attributes:
      user: Name of the user.
      host: Settings of the server, for all users.
      grant: Permissions of the user's key; None without a key.
    """

    user: str
    host: HostSettings
    grant: Grant | None

    @property
    def settings(self) -> HostSettings:
        """Settings of the server, restricted to the user's grant."""
        return self.host if self.grant is None else restrict(self.host, self.grant)

    @property
    def limits(self) -> Usage:
        """Limits of the user; a quarter of all processes is reserved for other keys."""
        limits = Usage.limit_of(self.host)
        if self.grant is None:
            return limits
        processes = limits.processes - limits.processes // 4
        limits = limits._replace(processes=max(processes, self.host.num_workers))
        grant = (self.grant.max_envs, self.grant.max_processes, self.grant.max_leases)
        return Usage(*(min(a, b or a) for a, b in zip(limits, grant, strict=True)))

    def _source_of(self, unit: str, limit: int) -> str:
        """Return the name of the setting that defines the limit of a `Usage` field."""
        if getattr(self.grant, f"max_{unit}", None) == limit:
            return f"max-{unit}= of {self.user} in the server's clients file"
        return f"{_option_of(unit)} of `envserve start`"

    def allowed_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the envs that the user may use."""
        return names if self.grant is None else _allowed_names(self.grant, names)

    def check_env(self, attach: Attach) -> None:
        """Raise Rejection unless the user may use the env and its arguments."""
        grant = self.grant
        if grant is not None and not grant.allows_env(attach.env_name):
            raise Rejection(
                ErrorCode.REFUSED,
                f"{self.user} may use {' and '.join(grant.envs)}, but requested "
                f"{attach.env_name}; the operator can add it to the clients file",
            )
        maps = attach.env_kwargs
        for kwargs in [maps] if isinstance(maps, Mapping) else maps:
            check_kwargs(self.host.allowed_kwargs, kwargs)
            if grant is not None and grant.allowed_kwargs is not None:
                check_kwargs(grant.allowed_kwargs, kwargs)

    def check_usage(self, requested: Usage, held: Iterable[tuple[str, Usage]]) -> None:
        """Raise OverQuota if a request exceeds a limit of the user or the server.

        `held` contains the user and usage of each existing lease.
        """
        columns = zip(
            Usage._fields, requested, *self._limits_and_use(held), strict=True
        )
        name = self.user or "the user without a key"
        for unit, amount, limit, total, used, used_by_others in columns:
            if amount > limit:
                raise OverQuota(
                    ErrorCode.REFUSED,
                    f"{name} may use {limit:,} {unit}, but requested {amount:,}; the "
                    f"operator can raise {self._source_of(unit, limit)}",
                )
            if used + amount > limit:
                raise OverQuota(
                    ErrorCode.ENVS_BUSY,
                    f"{name} uses {used:,} of its {limit:,} {unit} and requested "
                    f"{amount:,} more; other users use {used_by_others:,} of "
                    f"{total:,}; close other leases of {name} (`envserve status` lists "
                    f"them); the operator can raise {self._source_of(unit, limit)}",
                )
            if used + used_by_others + amount > total:
                raise OverQuota(
                    ErrorCode.ENVS_BUSY,
                    f"{amount:,} {unit} requested, {total - used - used_by_others:,} "
                    f"of {total:,} free; close leases, or start the server with a "
                    f"larger {_option_of(unit)}",
                )

    def num_free_envs(self, held: Iterable[tuple[str, Usage]]) -> int:
        """Return the number of envs that the user can lease now.

        It is 0 if the user may use no further process or lease. `held` contains the
        user and usage of each existing lease.
        """
        columns = zip(*self._limits_and_use(held), strict=True)
        free = Usage(
            *(
                min(limit - used, total - used - used_by_others)
                for limit, total, used, used_by_others in columns
            )
        )
        return free.envs if min(free) > 0 else 0

    def _limits_and_use(
        self, held: Iterable[tuple[str, Usage]]
    ) -> tuple[Usage, Usage, Usage, Usage]:
        """Return the limits of user and server, and the usage of user and others."""
        by_user, by_others = [Usage()], [Usage()]
        for holder, usage in held:
            (by_user if holder == self.user else by_others).append(usage)
        return (
            self.limits,
            Usage.limit_of(self.host),
            Usage(*map(sum, zip(*by_user, strict=True))),
            Usage(*map(sum, zip(*by_others, strict=True))),
        )


def _option_of(unit: str) -> str:
    """Return the option of `envserve start` that limits a field of `Usage`."""
    return "--max-processes" if unit == "processes" else "--envs-per-worker"


@lru_cache(maxsize=64)
def _allowed_names(grant: Grant, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(grant.allows_env, names))


class Quotas:
    """Looks up the quotas of users, and limits how fast they create leases."""

    def __init__(
        self, host: HostSettings, grant_of: Callable[[str], Grant | None] | None
    ) -> None:
        """Create the quotas of a server.

        `grant_of` returns the grant of a user's key, or None if the key is no longer
        valid. If the server uses no keys, `grant_of` itself is None.
        """
        self._host = host
        self._grant_of = grant_of
        #: Leaky bucket of each user: the monotonic time, in seconds, at which the next
        #: lease is due at the maximum rate.
        self._next_due: dict[str, float] = {}

    @property
    def uses_keys(self) -> bool:
        """Whether the server uses keys."""
        return self._grant_of is not None

    def of(self, user: str) -> Quota:
        """Return the quota of a user; raise Rejection if its key is no longer valid."""
        if self._grant_of is None or user in KEYLESS_USERS:
            return Quota(user, self._host, None)
        grant = self._grant_of(user)
        if grant is None:
            raise Rejection(
                ErrorCode.REFUSED,
                f"the key of {user} is no longer valid, because it has expired or was "
                f"removed; ask the operator for a new invitation (envserve invite "
                f"{user})",
            )
        return Quota(user, self._host, grant)

    def weight_of(self, user: str) -> float:
        """Return the weight with which a user shares the event loop's time."""
        try:
            grant = self.of(user).grant
        except Rejection:
            return 1.0
        return 1.0 if grant is None else grant.share

    def count_attach(self, quota: Quota, now: float) -> None:
        """Count a new lease of a user; raise RateLimited if the rate is too high."""
        if quota.grant is None:
            return
        interval = 1 / _ATTACHES_PER_SECOND
        due_at = max(self._next_due.get(quota.user, now), now)
        if due_at > now + (_MAX_ATTACH_BURST - 1) * interval:
            raise RateLimited(
                ErrorCode.ENVS_BUSY,
                f"{quota.user} may attach {_ATTACHES_PER_SECOND} times per second, in "
                f"bursts of up to {_MAX_ATTACH_BURST}; this request has to wait",
            )
        self._next_due[quota.user] = due_at + interval
