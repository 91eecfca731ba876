"""Who gets envs: what clients claim, whether there is room, and how claims end.

docs/decisions.md: "Envs are free once their workers are gone", "Sessions are keyed by
user and number, and their end is remembered".
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from envserve.errors import UnknownEnv, WrapperError
from envserve.lane import Block
from envserve.session.server.decisions import Decision, EndPool, SessionId, StartPool
from envserve.session.server.lease import Lease
from envserve.session.server.lease_record import Claim
from envserve.session.server.policy import Health, Refusal
from envserve.session.server.quotas import KEYLESS, Amounts, Quota, Quotas, tell
from envserve.session.server.replies import Answers, lease_lost
from envserve.session.states import ClaimState
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Rows, rows_mib
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.text import LogThrottle, one_line
from envserve.wire.bodies import Attach, Granted
from envserve.wire.constants import MAX_NAMES, MAX_RESULT_BYTES, ErrorCode
from envserve.wire.handshake import ErrorBody, Welcome
from envserve.wire.message import Message
from envserve.wrappers.specs import check_wrappers

__all__ = ["Claims", "Offer"]

_LOGGER: Final = logging.getLogger(__name__)

Value = TypeVar("Value")
#: Sessions of a user that have no envs, of which we still know something.
_MAX_RECENT: Final = 256
_MAX_PRINTED_NAME: Final = 64
#: Longest text of a refusal in the log.
_MAX_LINE: Final = 300
#: How many leases of one user have their envs built at a time; others wait.
_BUILDS_AT_ONCE: Final = 4


class Offer(Protocol):
    """The env names on offer, as of `registry.Registry`."""

    names: tuple[str, ...]

    def check(self, name: str) -> None:
        """Raises UnknownEnv."""


class _Recent(defaultdict[str, OrderedDict[int, Value]]):
    """Something about those sessions of each user of which it was noted last."""

    def __init__(self) -> None:
        super().__init__(OrderedDict)

    def note(self, session: SessionId, value: Value) -> None:
        """Notes something; forgets the user's oldest if that is too many."""
        sessions = self[session[0]]
        sessions[session[1]] = value
        sessions.move_to_end(session[1])
        if len(sessions) > _MAX_RECENT:
            sessions.popitem(last=False)


class Claims(dict[SessionId, Claim]):
    """All claims on the envs of a server, by session; and what became of late ones.

    Attributes:
      ended: Why sessions ended, so that a late ATTACH does not revive them.
      is_ending: Whether the server drains, or stops.
      unaware: Sessions whose leases have ended since, and that were not told yet.
    """

    def __init__(
        self, policy: HostSettings, offer: Offer, answers: Answers, quotas: Quotas
    ) -> None:
        super().__init__()
        self.ended: _Recent[ErrorBody | None] = _Recent()
        self.is_ending = False
        self.unaware: set[SessionId] = set()
        self._policy = policy
        self._offer = offer
        self._answers = answers
        self._quotas = quotas
        self._client_names: _Recent[str] = _Recent()
        self._refusals = LogThrottle()
        self._num_claims = 0

    @property
    def free_envs(self) -> int:
        """How many envs can be leased now."""
        leased = sum(claim.amounts.envs for claim in self.values())
        return self._policy.total_envs - leased

    @property
    def have_ended(self) -> bool:
        """Whether the server is ending, and no client thinks it has envs."""
        return self.is_ending and not self and not self.unaware

    def welcome(self, user: str, health: Health) -> Welcome:
        """Returns what a client is told before it asks for envs; raises Refusal."""
        quota = self._quotas.of(user)
        names, most = quota.choose(self._offer.names), quota.limits.envs
        own = sum(c.amounts.envs for c in self.values() if c.user == user)
        return Welcome(
            max_message_bytes=self._policy.max_message_bytes,
            lease_seconds=self._policy.lease_seconds,
            env_names=names[:MAX_NAMES],
            num_names=len(names),
            total_envs=most,
            free_envs=max(0, min(self.free_envs, most - own)),
            is_starting=health.is_starting,
            is_draining=self.is_ending,
            loop_lag_ms=int(1000 * health.loop_lag_seconds),
        )

    def name_of(self, session: SessionId) -> str:
        """Returns what a log calls a session, whose number is a secret."""
        return self[session].name if session in self else "a lease that has ended"

    def seen_by(self, user: str) -> list[Claim]:
        """Returns granted claims that a user may know of: its own.

        Without keys, or as the user who runs the server, all of them.
        """
        is_own_host = user in KEYLESS
        granted = (claim for claim in self.values() if claim.lease is not None)
        return [claim for claim in granted if is_own_host or claim.user == user]

    def note_name(self, session: SessionId, name: str) -> None:
        """Notes what a client calls itself, as far as that is fit for a log."""
        shown = one_line(name, _MAX_PRINTED_NAME)
        self._client_names.note(session, shown or "unnamed")

    def tell_refusal(self, refusal: Refusal, user: str, now: float) -> None:
        """Tells of a refusal; logs those of a kind once a second."""
        more = self._refusals.admit(refusal.body.code, now)
        if more is not None:
            _LOGGER.info("refused: %s%s", one_line(str(refusal), _MAX_LINE), more)
        tell(refusal.event, user, *refusal.asked, str(refusal))

    def add(self, message: Message, now: float) -> None:
        """Takes an ATTACH of a new session.

        Raises:
          Refusal: The client may not have such envs, or there is no room for them.
          RemoteProtocolError: The message is malformed.
        """
        attach = Attach.decode(message.body)
        user, number = session = message.peer[-1], message.session
        quota = self._quotas.of(user)
        client = self._client_names[user].get(number, "unnamed")
        if user:
            client = f"{user} ({client})"
        try:
            self._check(quota, attach)
            self._check_room(quota, attach, (user, client), now)
        except Refusal as refusal:
            refusal.asked = attach.env_name, attach.num_envs
            raise
        self._client_names[user].pop(number, None)
        self._num_claims += 1
        claim = self[session] = Claim(
            session,
            self._num_claims,
            quota.settings,
            Amounts.of(attach, quota.settings),
            attach,
            message.body,
            message,
            client,
            now,
            now,
        )
        _LOGGER.debug("%s, attaching (client: %s)", claim, client)

    def start_builds(self) -> list[Decision]:
        """Starts the envs of claims that wait for that, few of each user at a time."""
        building = [c for c in self.values() if c.state is ClaimState.BUILDING]
        count = Counter(claim.user for claim in building if not claim.is_waiting)
        starts: list[Decision] = []
        for claim in building:
            policy = claim.policy
            if policy.max_row_mib is not None:
                own = sum(c.row_mib for c in self.values() if c.user == claim.user)
                policy = replace(policy, max_row_mib=max(0, policy.max_row_mib - own))
            # How long rows are is known once the envs are built.
            most = _BUILDS_AT_ONCE if policy.max_row_mib is None else 1
            if claim.is_waiting and count[claim.user] < most:
                claim.is_waiting = False
                count[claim.user] += 1
                config = PoolSettings.of(claim.attach, policy)
                starts.append(StartPool(claim.session, config))
        return starts

    def _check(self, quota: Quota, attach: Attach) -> None:
        quota.check(attach)
        try:
            self._offer.check(attach.env_name)
            check_wrappers(attach.wrappers)
        except (UnknownEnv, WrapperError) as error:
            is_env = isinstance(error, UnknownEnv)
            code = ErrorCode.UNKNOWN_ENV if is_env else ErrorCode.BAD_WRAPPER
            raise Refusal(code, str(error)) from None

    def _check_room(
        self, quota: Quota, attach: Attach, asker: tuple[str, str], now: float
    ) -> None:
        """Says of others' leases only how many envs they are."""
        free = self.free_envs
        if attach.num_hosted <= free:
            held = [(c.user, c.amounts) for c in self.values()]
            quota.check_amounts(Amounts.of(attach, quota.settings), held)
            self._quotas.begin_lease(quota, now)
            return
        spares = ", half of them spares" if attach.spare_envs else ""
        holders = sorted(self.values(), key=lambda claim: -claim.attach.num_hosted)
        user, client = asker
        own = [c for c in holders if c.user == user and (user or c.client == client)]
        parts = [
            f"{c.attach.num_hosted} of {c.attach.env_name} by {c.client} for "
            f"{now - c.since:.0f} s"
            for c in own[:8]
        ]
        others = sum(claim.attach.num_hosted for claim in holders if claim not in own)
        if others:
            parts.append(f"{others} by others")
        is_own = bool(own) and holders[0] is own[0]
        raise Refusal(
            ErrorCode.ENVS_BUSY,
            f"{attach.num_hosted} envs asked for{spares}, {free} of "
            f"{self._policy.total_envs} free (leased: {'; '.join(parts) or 'none'}); "
            f"ask for fewer, end what holds them, or start the server with more "
            f"--workers or --envs-per-worker",
            holder=own[0].client if is_own else "others" if holders else "",
            held_ms=int(1000 * (now - own[0].since)) if is_own else 0,
        )

    def grant(
        self, claim: Claim, spec: EnvSpec, blocks: Sequence[Block], rows: Rows
    ) -> None:
        """Makes the lease of a claim whose envs are built; raises Refusal."""
        lease = Lease(
            session=claim.session,
            epoch=claim.number,
            spec=spec,
            blocks=blocks,
            rows=rows,
            policy=claim.policy,
            answers=self._answers,
        )
        granted = Granted(
            epoch=claim.number,
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
        claim.lease, claim.row_mib = lease, rows_mib(spec, len(rows.reward))
        claim.machine.move(ClaimState.GRANTED)
        attach = claim.attach
        tell("attached", claim.user, attach.env_name, attach.num_envs)

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
            _LOGGER.debug("%s, ending; %d late copies were ignored", claim, late)
            claim.lease = None
        return [EndPool(claim.session)]

    def close_users(self, users: Collection[str]) -> list[Decision]:
        """Ends all claims of users whose keys were taken away, and tells them."""
        reason = lease_lost(
            "the key of this client was removed, or has expired; ask the operator of "
            'the server for an invitation, and run "envserve join"'
        )
        decisions: list[Decision] = []
        for claim in self.values():
            if claim.user in users and claim.reason != reason:  # it was told already
                # At once: there is no connection any more when the workers are gone.
                decisions.append(self._answers.session_ended(claim.asked, reason))
                decisions += self.close(claim, reason)
                self.unaware.discard(claim.session)
                _LOGGER.warning("%s, ended: its key was taken away", claim)
        return decisions

    def close_all(self, reason: ErrorBody) -> list[Decision]:
        """Begins to end all claims, since the server is about to stop."""
        self.is_ending = True
        self.unaware.update(c.session for c in self.values() if c.reason is not None)
        return [end for claim in self.values() for end in self.close(claim, reason)]

    def remove(self, session: SessionId) -> Claim:
        """Frees the envs of a claim whose workers are gone; returns it."""
        claim = self.pop(session)
        claim.machine.move(ClaimState.ENDED)
        self.ended.note(session, claim.reason)
        why = claim.reason.text.partition("\n")[0] if claim.reason else "detached"
        fields = {"fields": {**claim.fields, "why": why}}
        text = "%s, ended%s (%s)"
        _LOGGER.info(text, claim, claim.done, one_line(why), extra=fields)
        if claim.granted:
            attach = claim.attach
            tell("ended", claim.user, attach.env_name, attach.num_envs, why)
        return claim

    def close_silent(self, now: float) -> list[Decision]:
        """Ends the claims of clients that have been silent for too long."""
        decisions: list[Decision] = []
        for claim in self.values():
            silence = now - claim.heard_at
            # The same sum as in `next_deadline`.
            is_silent = now >= claim.heard_at + self._policy.lease_seconds
            if is_silent and claim.state is not ClaimState.CLOSING:
                text = f"its client was silent for {silence:.1f} s"
                decisions += self.close(claim, lease_lost(text))
                self.unaware.discard(claim.session)  # nobody is there to know
        return decisions

    def next_deadline(self) -> float:
        """When `close_silent` has to be called next."""
        open_ = (c for c in self.values() if c.state is not ClaimState.CLOSING)
        return (
            min((c.heard_at for c in open_), default=math.inf)
            + self._policy.lease_seconds
        )
