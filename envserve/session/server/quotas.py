"""How much each user may have of a server, within what all may have together.

A user is the name of a key; or it is "local", or "" without one, and then the host's
limits are all there is. What a key may, its grant, only ever narrows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from envserve.keys.grant import Grant
from envserve.session.server.policy import (
    OverQuota,
    RateLimited,
    Refusal,
    check_kwargs,
    restrict,
)
from envserve.settings import HostSettings
from envserve.wire.bodies import Attach
from envserve.wire.constants import ErrorCode

#: Who is known by no key.
KEYLESS_USERS: Final = frozenset({"", "local"})
#: How fast a key may begin leases, each of which forks processes.
_ATTACHES_PER_SECOND: Final = 2
_MAX_ATTACH_BURST: Final = 8


class Usage(NamedTuple):
    """Envs, worker processes and leases: of one lease, of a user, or of all users."""

    envs: int = 0
    processes: int = 0
    leases: int = 0

    @classmethod
    def requested_by(cls, attach: Attach, host: HostSettings) -> Usage:
        """Returns what a client asks for."""
        most = attach.num_envs // min(attach.num_splits, attach.num_envs)
        each = min(host.num_workers, attach.blocks_per_split or most, most)
        return cls(attach.num_hosted, each, 1)

    @classmethod
    def limit_of(cls, host: HostSettings) -> Usage:
        """Returns the most that all users of a host may have together."""
        processes = max(host.max_processes, host.num_workers)
        return cls(host.total_envs, processes, host.total_envs)


@dataclass(frozen=True)
class Quota:
    """What one user may.

    Attributes:
      user: Who.
      host: What all may.
      grant: What the user's key may; None without a key.
    """

    user: str
    host: HostSettings
    grant: Grant | None

    @property
    def settings(self) -> HostSettings:
        """The host's, as narrow as they are for the user."""
        return self.host if self.grant is None else restrict(self.host, self.grant)

    @property
    def limits(self) -> Usage:
        """The most that the user may have: keys leave a quarter of processes."""
        most = Usage.limit_of(self.host)
        if self.grant is None:
            return most
        processes = most.processes - most.processes // 4
        most = most._replace(processes=max(processes, self.host.num_workers))
        grant = (self.grant.max_envs, self.grant.max_processes, self.grant.max_leases)
        return Usage(*(min(a, b or a) for a, b in zip(most, grant, strict=True)))

    def allowed_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the env names on offer that the user may have."""
        return names if self.grant is None else _allowed_names(self.grant, names)

    def check(self, attach: Attach) -> None:
        """Raises Refusal for an env, or an argument of it, that is not allowed."""
        grant = self.grant
        if grant is not None and not grant.allows_env(attach.env_name):
            raise Refusal(
                ErrorCode.REFUSED,
                f"{self.user} may use {' and '.join(grant.envs)}; asked for "
                f"{attach.env_name}; the operator can add it in the file clients",
            )
        check_kwargs(self.host.allowed_kwargs, attach.env_kwargs)
        if grant is not None and grant.allowed_kwargs is not None:
            check_kwargs(grant.allowed_kwargs, attach.env_kwargs)

    def check_usage(self, requested: Usage, held: Iterable[tuple[str, Usage]]) -> None:
        """Raise OverQuota if a request exceeds what the user may have, now or ever.

        Args:
          requested: Amounts that the user requests.
          held: User and usage of each lease in the table.
        """
        own, others = [Usage()], [Usage()]
        for holder, amounts in held:
            (own if holder == self.user else others).append(amounts)
        columns = zip(
            Usage._fields,
            requested,
            self.limits,
            map(sum, zip(*own, strict=True)),
            map(sum, zip(*others, strict=True)),
            Usage.limit_of(self.host),
            strict=True,
        )
        name = self.user or "whoever has no key"
        for what, wanted, limit, has, others_have, total in columns:
            if wanted > limit:
                raise OverQuota(
                    ErrorCode.REFUSED,
                    f"{name} may have {limit:,} {what}; asked for {wanted:,}; the "
                    f"operator can allow more in the file clients",
                )
            if has + wanted > limit:
                raise OverQuota(
                    ErrorCode.ENVS_BUSY,
                    f"{name} has {has:,} of its {limit:,} {what}; others have "
                    f"{others_have:,} of {total:,}",
                )
            if has + others_have + wanted > total:
                raise OverQuota(
                    ErrorCode.ENVS_BUSY,
                    f"{wanted:,} {what} asked for, {total - has - others_have:,} of "
                    f"{total:,} free; end what holds them, or start the server with "
                    f"more --max-processes",
                )


@lru_cache(maxsize=64)
def _allowed_names(grant: Grant, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(grant.allows_env, names))


class Quotas:
    """Knows what users may, and how fast they have begun leases of late."""

    def __init__(
        self, host: HostSettings, grant_of: Callable[[str], Grant | None] | None
    ) -> None:
        """Starts with nothing begun.

        Args:
          host: What all may.
          grant_of: What the key of a name may; None if it is not good any more.
            Where there is no such function, users have no keys.
        """
        self._host = host
        self._grant_of = grant_of
        #: When each user's next lease would begin if they had come evenly.
        self._next_due: dict[str, float] = {}

    @property
    def uses_keys(self) -> bool:
        """Whether users have keys."""
        return self._grant_of is not None

    def of(self, user: str) -> Quota:
        """Returns what a user may; raises Refusal if that is nothing."""
        if self._grant_of is None or user in KEYLESS_USERS:
            return Quota(user, self._host, None)
        grant = self._grant_of(user)
        if grant is None:
            raise Refusal(
                ErrorCode.REFUSED,
                f"the key of {user} is not good here any more: it has expired, or was "
                f"removed; ask for another invitation: envserve invite {user}",
            )
        return Quota(user, self._host, grant)

    def weight_of(self, user: str) -> float:
        """Returns how a user's share of the loop compares with those of others."""
        try:
            grant = self.of(user).grant
        except Refusal:
            return 1.0
        return 1.0 if grant is None else grant.share

    def count_attach(self, quota: Quota, now: float) -> None:
        """Notes that a lease begins; raises TooEarly if it may not yet."""
        if quota.grant is None:
            return
        interval = 1 / _ATTACHES_PER_SECOND
        due = max(self._next_due.get(quota.user, now), now)
        if due > now + (_MAX_ATTACH_BURST - 1) * interval:
            raise RateLimited(
                ErrorCode.ENVS_BUSY,
                f"{quota.user} may attach {_ATTACHES_PER_SECOND} times a second, and "
                f"{_MAX_ATTACH_BURST} times at once; more of them wait",
            )
        self._next_due[quota.user] = due + interval
