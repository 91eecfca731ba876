"""Who gets envs: what a client claims, whether there is room, and what is built."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from envserve.errors import UnknownEnv, WrapperError
from envserve.lane import PoolConfig
from envserve.session.lease import Lease
from envserve.session.policy import Policy, Refusal
from envserve.wire import Attach, ErrorBody, ErrorCode
from envserve.wrappers import check_wrappers

__all__ = [
    "Claim",
    "ClaimState",
    "Offer",
    "Recent",
    "check_claim",
    "pool_config",
    "printable_name",
]

Value = TypeVar("Value")
#: Sessions that have no envs, of which we still know something.
_MAX_RECENT: Final = 256
_MAX_PRINTED_NAME: Final = 64


class Offer(Protocol):
    """The env names on offer, as of `registry.Registry`."""

    names: tuple[str, ...]

    def check(self, name: str) -> None:
        """Raises UnknownEnv, with near matches."""


class Recent(OrderedDict[int, Value]):
    """Something about the sessions of which it was noted last."""

    def note(self, session: int, value: Value) -> None:
        """Notes something; forgets the oldest if that is too many."""
        self[session] = value
        self.move_to_end(session)
        if len(self) > _MAX_RECENT:
            self.popitem(last=False)


class ClaimState(enum.Enum):
    """Where a claim is in its life."""

    BUILDING = enum.auto()
    GRANTED = enum.auto()
    CLOSING = enum.auto()


@dataclass(slots=True)
class Claim:
    """One client's claim on envs.

    Attributes:
      session: The client's number.
      attach: What it asked for.
      attach_body: The same, as bytes, to know a copy by.
      route: Where its latest message came from.
      request: The number of its latest ATTACH or DETACH.
      client: What the client calls itself, fit for a line of a log.
      since: When it came first.
      heard_at: When the client was heard last.
      state: See `ClaimState`.
      lease: The operations on its envs, once GRANTED.
      granted: Body of GRANTED.
      ending: Why it is CLOSING; None for a DETACH.
    """

    session: int
    attach: Attach
    attach_body: bytes
    route: bytes
    request: int
    client: str
    since: float
    heard_at: float
    state: ClaimState = ClaimState.BUILDING
    lease: Lease | None = None
    granted: bytes = b""
    ending: ErrorBody | None = None

    def __str__(self) -> str:
        envs = f"{self.attach.num_envs} {self.attach.env_name}"
        return f"session {self.session:016x}: {envs}"


def printable_name(name: str) -> str:
    """Returns what a client calls itself, fit for a line of a log."""
    shown = "".join(c if c.isprintable() else "?" for c in name[:_MAX_PRINTED_NAME])
    return shown or "unnamed"


def check_claim(
    attach: Attach, offer: Offer, policy: Policy, others: Collection[Claim], now: float
) -> None:
    """Raises Refusal if the client may not have, or there is no room for, such envs."""
    try:
        offer.check(attach.env_name)
    except UnknownEnv as error:
        raise Refusal(ErrorCode.UNKNOWN_ENV, str(error)) from None
    try:
        check_wrappers(attach.wrappers)
    except WrapperError as error:
        raise Refusal(ErrorCode.BAD_WRAPPER, str(error)) from None
    policy.check_kwargs(attach.env_kwargs)
    free = policy.total_envs - sum(claim.attach.num_hosted for claim in others)
    if attach.num_hosted <= free:
        return
    spares = ", half of them spares" if attach.spare_envs else ""
    holders = sorted(others, key=lambda claim: -claim.attach.num_hosted)
    leases = "; ".join(
        f"{claim.attach.num_hosted} of {claim.attach.env_name} by {claim.client} for "
        f"{now - claim.since:.0f} s"
        for claim in holders[:8]
    )
    raise Refusal(
        ErrorCode.ENVS_BUSY,
        f"{attach.num_hosted} envs asked for{spares}, {free} of {policy.total_envs} "
        f"free (leased: {leases or 'none'}); ask for fewer, end what holds them, or "
        f"start the server with more --workers or --envs-per-worker",
        holder=holders[0].client if holders else "",
        held_ms=int(1000 * (now - holders[0].since)) if holders else 0,
    )


def pool_config(attach: Attach, policy: Policy) -> PoolConfig:
    """Returns what to build for a claim."""
    return PoolConfig(
        env_name=attach.env_name,
        num_envs=attach.num_envs,
        num_workers=policy.num_workers,
        num_splits=attach.num_splits,
        seed=attach.seed,
        first_env_index=attach.first_env_index,
        first_incarnation=attach.first_incarnation,
        env_kwargs=attach.env_kwargs,
        wrappers=attach.wrappers,
        import_modules=policy.import_modules,
        autoreset=attach.autoreset,
        infos=attach.infos,
        spare_envs=attach.spare_envs,
        step_timeout_seconds=policy.step_timeout_seconds,
        reset_timeout_seconds=policy.reset_timeout_seconds,
        padding_after_seconds=policy.padding_after_seconds,
        max_restarts=policy.max_restarts,
        crash_dir=policy.crash_dir,
    )
