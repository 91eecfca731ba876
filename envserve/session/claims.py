"""Who gets envs: what clients claim, whether there is room, and how claims end.

docs/decisions.md: "Envs are free once their workers are gone", "The end of a session is
remembered".
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from envserve import codec
from envserve.errors import UnknownEnv, WrapperError
from envserve.lane import Block
from envserve.session.answers import Answers, lease_lost
from envserve.session.decisions import Decision, EndPool
from envserve.session.lease import Lease
from envserve.session.policy import Health, Refusal, check_kwargs
from envserve.session.states import ClaimState, Machine
from envserve.settings import HostSettings
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import Attach, ErrorBody, ErrorCode, Granted, Message, Welcome
from envserve.wire.constants import MAX_NAMES, MAX_RESULT_BYTES
from envserve.wrappers import check_wrappers

__all__ = ["Claim", "Claims", "Offer"]

_LOGGER: Final = logging.getLogger(__name__)

Value = TypeVar("Value")
#: Sessions that have no envs, of which we still know something.
_MAX_RECENT: Final = 256
_MAX_PRINTED_NAME: Final = 64


class Offer(Protocol):
    """The env names on offer, as of `registry.Registry`."""

    names: tuple[str, ...]

    def check(self, name: str) -> None:
        """Raises UnknownEnv, with near matches."""


class _Recent(OrderedDict[int, Value]):
    """Something about the sessions of which it was noted last."""

    def note(self, session: int, value: Value) -> None:
        """Notes something; forgets the oldest if that is too many."""
        self[session] = value
        self.move_to_end(session)
        if len(self) > _MAX_RECENT:
            self.popitem(last=False)


@dataclass(slots=True)
class Claim:
    """One client's claim on envs.

    Attributes:
      session: The client's number.
      attach: What it asked for.
      attach_body: The same, as bytes, to know a copy by.
      asked: Its latest ATTACH or DETACH, with the route of its latest message.
      client: What the client calls itself, fit for a line of a log.
      since: When it came first.
      heard_at: When the client was heard last.
      machine: Where it is.
      lease: The operations on its envs, while GRANTED.
      granted: Body of GRANTED.
      reason: Why it is CLOSING; None for a DETACH.
    """

    session: int
    attach: Attach
    attach_body: bytes
    asked: Message
    client: str
    since: float
    heard_at: float
    machine: Machine[ClaimState] = field(
        default_factory=lambda: Machine(ClaimState.BUILDING)
    )
    lease: Lease | None = None
    granted: bytes = b""
    reason: ErrorBody | None = None

    @property
    def state(self) -> ClaimState:
        """See `ClaimState`."""
        return self.machine.state

    def __str__(self) -> str:
        envs = f"{self.attach.num_envs} {self.attach.env_name}"
        return f"session {self.session:016x}: {envs}"


class Claims(dict[int, Claim]):
    """All claims on the envs of a server, by session; and what became of late ones.

    Attributes:
      ended: Why sessions ended, so that a late ATTACH does not revive them.
      is_ending: Whether the server drains, or stops.
      unaware: Sessions whose leases have ended since, and that were not told yet.
    """

    def __init__(self, policy: HostSettings, offer: Offer, answers: Answers) -> None:
        super().__init__()
        self.ended: _Recent[ErrorBody | None] = _Recent()
        self.is_ending = False
        self.unaware: set[int] = set()
        self._policy = policy
        self._offer = offer
        self._answers = answers
        self._client_names: _Recent[str] = _Recent()
        self._epoch = 0

    @property
    def free_envs(self) -> int:
        """How many envs can be leased now."""
        leased = sum(claim.attach.num_hosted for claim in self.values())
        return self._policy.total_envs - leased

    @property
    def have_ended(self) -> bool:
        """Whether the server is ending, and no client thinks it has envs."""
        return self.is_ending and not self and not self.unaware

    def welcome(self, health: Health) -> Welcome:
        """Returns what a client is told before it asks for envs."""
        return Welcome(
            max_message_bytes=self._policy.max_message_bytes,
            lease_seconds=self._policy.lease_seconds,
            env_names=self._offer.names[:MAX_NAMES],
            num_names=len(self._offer.names),
            total_envs=self._policy.total_envs,
            free_envs=self.free_envs,
            is_starting=health.is_starting,
            is_draining=self.is_ending,
            loop_lag_ms=int(1000 * health.loop_lag_seconds),
        )

    def note_name(self, session: int, name: str) -> None:
        """Notes what a client calls itself, as far as that is fit for a log."""
        shown = "".join(c if c.isprintable() else "?" for c in name[:_MAX_PRINTED_NAME])
        self._client_names.note(session, shown or "unnamed")

    def add(self, message: Message, now: float) -> Claim:
        """Takes an ATTACH of a new session.

        Raises:
          Refusal: The client may not have such envs, or there is no room for them.
          RemoteProtocolError: The message is malformed.
        """
        attach = Attach.decode(message.body)
        self._check(attach, now)
        session = message.session
        client = self._client_names.pop(session, "unnamed")
        claim = self[session] = Claim(
            session, attach, message.body, message, client, now, now
        )
        _LOGGER.info("%s, attaching (client: %s)", claim, client)
        return claim

    def _check(self, attach: Attach, now: float) -> None:
        try:
            self._offer.check(attach.env_name)
        except UnknownEnv as error:
            raise Refusal(ErrorCode.UNKNOWN_ENV, str(error)) from None
        try:
            check_wrappers(attach.wrappers)
        except WrapperError as error:
            raise Refusal(ErrorCode.BAD_WRAPPER, str(error)) from None
        check_kwargs(self._policy, attach.env_kwargs)
        free = self.free_envs
        if attach.num_hosted <= free:
            return
        spares = ", half of them spares" if attach.spare_envs else ""
        holders = sorted(self.values(), key=lambda claim: -claim.attach.num_hosted)
        leases = "; ".join(
            f"{claim.attach.num_hosted} of {claim.attach.env_name} by {claim.client} "
            f"for {now - claim.since:.0f} s"
            for claim in holders[:8]
        )
        raise Refusal(
            ErrorCode.ENVS_BUSY,
            f"{attach.num_hosted} envs asked for{spares}, {free} of "
            f"{self._policy.total_envs} free (leased: {leases or 'none'}); ask for "
            f"fewer, end what holds them, or start the server with more --workers or "
            f"--envs-per-worker",
            holder=holders[0].client if holders else "",
            held_ms=int(1000 * (now - holders[0].since)) if holders else 0,
        )

    def grant(
        self, claim: Claim, spec: EnvSpec, blocks: Sequence[Block], rows: Rows
    ) -> None:
        """Makes the lease of a claim whose envs are built; raises Refusal."""
        self._epoch += 1
        lease = Lease(
            session=claim.session,
            epoch=self._epoch,
            spec=spec,
            blocks=blocks,
            rows=rows,
            policy=self._policy,
            answers=self._answers,
        )
        granted = Granted(
            epoch=self._epoch,
            lease_seconds=self._policy.lease_seconds,
            spec=spec,
            blocks=tuple(blocks),
        )
        try:
            claim.granted = granted.encode()
        except codec.CodecError as error:
            raise Refusal(ErrorCode.ENV_START_FAILED, str(error)) from None
        if lease.max_result_bytes > MAX_RESULT_BYTES:
            raise Refusal(
                ErrorCode.ENV_START_FAILED,
                f"results of {len(rows.reward)} envs need up to "
                f"{lease.max_result_bytes} bytes, and clients accept "
                f"{MAX_RESULT_BYTES} at once; ask for fewer envs per server",
            )
        claim.lease = lease
        claim.machine.move(ClaimState.GRANTED)

    def close(self, claim: Claim, reason: ErrorBody | None) -> list[Decision]:
        """Begins to end a claim; its client is told when the envs are gone.

        Args:
          claim: A claim; one that is CLOSING stays so, for its first reason.
          reason: Why, for the client; None if it has detached.
        """
        if claim.state is ClaimState.CLOSING:
            return []
        claim.machine.move(ClaimState.CLOSING)
        claim.reason = reason
        if self.is_ending and reason is not None:
            self.unaware.add(claim.session)
        if claim.lease is not None:
            late = claim.lease.late_messages
            _LOGGER.info("%s, ending; %d late copies were ignored", claim, late)
            claim.lease = None
        return [EndPool(claim.session)]

    def close_all(self, reason: ErrorBody) -> list[Decision]:
        """Begins to end all claims, since the server is about to stop."""
        self.is_ending = True
        self.unaware.update(c.session for c in self.values() if c.reason is not None)
        return [end for claim in self.values() for end in self.close(claim, reason)]

    def remove(self, session: int) -> Claim:
        """Frees the envs of a claim whose workers are gone; returns it."""
        claim = self.pop(session)
        claim.machine.move(ClaimState.ENDED)
        self.ended.note(session, claim.reason)
        why = claim.reason.text.partition("\n")[0] if claim.reason else "detached"
        _LOGGER.info("%s, ended (%s)", claim, why)
        return claim

    def close_silent(self, now: float) -> list[Decision]:
        """Ends the claims of clients that have been silent for too long."""
        decisions: list[Decision] = []
        for claim in self.values():
            silence = now - claim.heard_at
            # The same sum as in `next_deadline`.
            if now >= claim.heard_at + self._policy.lease_seconds and (
                claim.state is not ClaimState.CLOSING
            ):
                text = f"its client was silent for {silence:.1f} s"
                decisions += self.close(claim, lease_lost(text))
                self.unaware.discard(claim.session)  # nobody is there to know
        return decisions

    def next_deadline(self) -> float:
        """When `close_silent` has to be called next."""
        heard = [
            claim.heard_at
            for claim in self.values()
            if claim.state is not ClaimState.CLOSING
        ]
        return min(heard, default=math.inf) + self._policy.lease_seconds
