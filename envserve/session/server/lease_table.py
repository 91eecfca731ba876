"""Admits a server's leases, starts the builds of their envs, and ends the leases.

A lease is in the table from its ATTACH until its workers have exited; see `LeaseState`.
During this time its envs count as leased. The table stores why recent leases ended, so
that a delayed ATTACH does not create a lease that its client no longer wants. See the
decisions "Envs are free once their workers are gone" and "Sessions are keyed by user
and number, and their end is remembered".
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from envserve.errors import WrapperError
from envserve.lane import Block, block_counts
from envserve.session.server.decisions import (
    Audit,
    Decision,
    EndPool,
    ResendLimiter,
    SessionId,
    StartPool,
)
from envserve.session.server.lease import Lease
from envserve.session.server.permissions import Rejection
from envserve.session.server.quotas import KEYLESS_USERS, Quota, Quotas, Usage
from envserve.session.server.reply_builder import ReplyBuilder, lease_lost
from envserve.session.states import LeaseState, StateMachine
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Rows, rows_mib
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.text import LogThrottle, counted, one_line
from envserve.wire.bodies import Attach, Granted
from envserve.wire.constants import MAX_ENTRIES, MAX_NAMES, MAX_RESULT_BYTES, ErrorCode
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Welcome
from envserve.wire.message import Message
from envserve.wrappers.specs import check_wrappers

_LOGGER: Final = logging.getLogger(__name__)

Value = TypeVar("Value")
#: For each user, the table stores the client names of up to this many sessions that
#: have no lease yet, and the reasons why up to this many sessions have ended.
_MAX_RECENT_SESSIONS: Final = 256
#: Maximum length of a client's name in the log.
_MAX_LOGGED_NAME: Final = 64
#: Maximum length of a rejection's text in the log.
_MAX_LOGGED_TEXT: Final = 300
#: Maximum number of leases per user whose envs are built concurrently.
_MAX_CONCURRENT_BUILDS: Final = 4


@dataclass(slots=True)
class LeaseRecord:
    """A lease from its ATTACH until its envs are free. Times are monotonic seconds.

    Attributes:
      session: User and session number; the number is secret.
      number: Sequence number of the lease since the server started; also its epoch.
      settings: Settings of the server, restricted to the user's grant.
      usage: Number of envs and processes of the lease.
      attach: Arguments of the ATTACH that requested the lease.
      attach_body: The encoded arguments, which identify copies of the ATTACH.
      request: Latest ATTACH or DETACH; its `peer` is that of the latest message.
      client: User and name of the client, as printable text.
      attached_at: Time of the first ATTACH.
      last_message_at: Time of the latest message.
      machine: State of the lease.
      is_queued: Whether the build of the envs has not started yet.
      lease: Executes operations on the envs; None unless the lease is GRANTED.
      granted_body: Body of the GRANTED message; empty before the lease is granted.
      row_mib: Memory of the rows in MiB.
      reason: Reason why the lease is CLOSING; None after a DETACH.
      grant_limiter: Limits how often the GRANTED message is sent again.
      unfinished_rows: Indices of the rows that have not ended an episode since the
        drain began; None unless the server is draining.
      statistics: Counters of the lease's pool; empty until the pool is closed.
    """

    session: SessionId
    number: int
    settings: HostSettings
    usage: Usage
    attach: Attach
    attach_body: bytes
    request: Message
    client: str
    attached_at: float
    last_message_at: float
    machine: StateMachine[LeaseState] = field(
        default_factory=lambda: StateMachine(LeaseState.BUILDING)
    )
    is_queued: bool = True
    lease: Lease | None = None
    granted_body: bytes = b""
    row_mib: int = 0
    reason: ErrorBody | None = None
    grant_limiter: ResendLimiter = field(default_factory=ResendLimiter)
    unfinished_rows: set[int] | None = None
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def user(self) -> str:
        """Name of the user; "" if the user is unknown."""
        return self.session[0]

    @property
    def state(self) -> LeaseState:
        """State of the lease."""
        return self.machine.state

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields of the lease's lines in a JSON log."""
        envs = {"env": self.attach.env_name, "num_envs": self.attach.num_envs}
        return {"lease": self.number, "client": self.client, **envs, **self.statistics}

    @property
    def summary(self) -> str:
        """Log text with env steps, speed and number of faults; "" if not known."""
        text = (
            " after {env_steps:,} env steps in {seconds:,.1f} s, "
            "{steps_per_second:,.0f}/s, faults: {num_faults}"
        )
        is_known = self.granted_body and self.statistics
        return text.format(**self.statistics) if is_known else ""

    @property
    def name(self) -> str:
        """Name of the lease in logs, without the secret session number."""
        return f"lease {self.number}" + (f" of {self.user}" if self.user else "")

    def audit_event(self, event: str, reason: str = "") -> Audit:
        """Return an event of this lease for the audit log."""
        attach = self.attach
        return Audit(event, self.user, attach.env_name, attach.num_envs, reason)

    def __str__(self) -> str:
        return f"{self.name}: {self.attach.num_envs} {self.attach.env_name}"


class _RecentSessions(defaultdict[str, OrderedDict[int, Value]]):
    """Values of recent sessions, by user and session number.

    At most `_MAX_RECENT_SESSIONS` values are stored for each user.
    """

    def __init__(self) -> None:
        super().__init__(OrderedDict)

    def add(self, session: SessionId, value: Value) -> None:
        """Store a session's value; above the limit, evict the user's oldest value."""
        sessions = self[session[0]]
        sessions[session[1]] = value
        sessions.move_to_end(session[1])
        if len(sessions) > _MAX_RECENT_SESSIONS:
            sessions.popitem(last=False)


class LeaseTable(dict[SessionId, LeaseRecord]):
    """All leases of a server, by session, and the reasons why recent leases ended.

    Attributes:
      ended_sessions: Reasons why recent sessions ended, by user and session number; the
        reason is None after a DETACH.
      is_ending: Whether the server is draining or stopping.
      unnotified: Sessions whose clients may not have been notified yet that their lease
        has ended.
    """

    def __init__(
        self,
        settings: HostSettings,
        env_names: tuple[str, ...],
        reply_builder: ReplyBuilder,
        quotas: Quotas,
    ) -> None:
        super().__init__()
        self.ended_sessions: _RecentSessions[ErrorBody | None] = _RecentSessions()
        self.is_ending = False
        self.unnotified: set[SessionId] = set()
        self._settings = settings
        self._env_names = env_names
        self._reply_builder = reply_builder
        self._quotas = quotas
        self._client_names: _RecentSessions[str] = _RecentSessions()
        self._rejection_throttle = LogThrottle()
        self._num_leases = 0

    @property
    def num_free_envs(self) -> int:
        """Number of envs that are not leased."""
        leased = sum(record.usage.envs for record in self.values())
        return self._settings.total_envs - leased

    def _usages(self) -> Iterator[tuple[str, Usage]]:
        return ((record.user, record.usage) for record in self.values())

    def welcome_for(self, user: str) -> Welcome:
        """Return the WELCOME for a user; raise Rejection if its key is not valid."""
        quota = self._quotas.of(user)
        names = quota.allowed_names(self._env_names)
        return Welcome(
            max_message_bytes=self._settings.max_message_bytes,
            lease_seconds=self._settings.lease_seconds,
            env_names=names[:MAX_NAMES],
            num_names=len(names),
            total_envs=quota.limits.envs,
            free_envs=quota.num_free_envs(self._usages()),
            is_draining=self.is_ending,
        )

    def name_of(self, session: SessionId) -> str:
        """Return the name of a session's lease, for logs."""
        return self[session].name if session in self else "a lease that has ended"

    def visible_to(self, user: str) -> list[LeaseRecord]:
        """Return a user's granted leases, or all leases if the user has no key."""
        sees_all = user in KEYLESS_USERS
        granted = (record for record in self.values() if record.lease is not None)
        return [record for record in granted if sees_all or record.user == user]

    def record_client_name(self, session: SessionId, name: str) -> None:
        """Store the name from a client's HELLO, in a printable form."""
        printable_name = one_line(name, _MAX_LOGGED_NAME)
        self._client_names.add(session, printable_name or "unnamed")

    def audit_rejection(self, rejection: Rejection, user: str, now: float) -> Audit:
        """Log a rejection, and return its event for the audit log.

        At most one rejection per second is logged for each error code.
        """
        more = self._rejection_throttle.admit(rejection.body.code, now)
        if more is not None:
            _LOGGER.info("rejected: %s%s", str(rejection)[:_MAX_LOGGED_TEXT], more)
        return Audit(rejection.event, user, *rejection.requested, str(rejection))

    # Admission.

    def add(self, message: Message, now: float) -> None:
        """Add the lease that the ATTACH of a new session requests.

        Raises:
          Rejection: The user may not use such envs, or too few envs are free.
          RemoteProtocolError: The message is malformed.
        """
        attach = Attach.decode(message.body)
        user, number = session = message.peer[-1], message.session
        quota = self._quotas.of(user)
        client = self._client_names[user].get(number, "unnamed")
        if user:
            client = f"{user} ({client})"
        usage = Usage.requested_by(attach, quota.settings)
        try:
            self._check_allowed(quota, attach)
            # A key's limit may be lower than the server's. Waiting cannot help then.
            max_grantable = min(self._settings.total_envs, usage.envs)
            if usage.envs > self.num_free_envs and quota.limits.envs >= max_grantable:
                raise self._busy_rejection(attach, user, client, now)
            quota.check_usage(usage, self._usages())
            self._quotas.count_attach(quota, now)
        except Rejection as rejection:
            rejection.requested = attach.env_name, attach.num_envs
            raise
        self._client_names[user].pop(number, None)
        self._num_leases += 1
        record = self[session] = LeaseRecord(
            session=session,
            number=self._num_leases,
            settings=quota.settings,
            usage=usage,
            attach=attach,
            attach_body=message.body,
            request=message,
            client=client,
            attached_at=now,
            last_message_at=now,
        )
        _LOGGER.debug("%s, attaching (client: %s)", record, client)

    def start_builds(self) -> list[Decision]:
        """Return decisions to build envs of queued leases, a few leases per user."""
        building = [r for r in self.values() if r.state is LeaseState.BUILDING]
        count = Counter(record.user for record in building if not record.is_queued)
        starts: list[Decision] = []
        for record in building:
            settings = record.settings
            if settings.max_row_mib is not None:
                used = sum(r.row_mib for r in self.values() if r.user == record.user)
                remaining = max(0, settings.max_row_mib - used)
                settings = replace(settings, max_row_mib=remaining)
            # If row memory is limited, build the envs of only one lease per user at a
            # time, because the size of the rows is not known before the build.
            max_builds = _MAX_CONCURRENT_BUILDS if settings.max_row_mib is None else 1
            if record.is_queued and count[record.user] < max_builds:
                record.is_queued = False
                count[record.user] += 1
                config = PoolSettings.of(record.attach, settings)
                starts.append(StartPool(record.session, config))
        return starts

    def _check_allowed(self, quota: Quota, attach: Attach) -> None:
        quota.check_env(attach)
        name = attach.env_name
        if name not in self._env_names:
            raise Rejection(
                ErrorCode.UNKNOWN_ENV, f"this server offers no env named {name!r}"
            )
        num_splits, per_split = block_counts(
            attach.num_envs,
            quota.settings.num_workers,
            attach.num_splits,
            attach.blocks_per_split,
        )
        if (count := num_splits * per_split) > MAX_ENTRIES:
            raise Rejection(
                ErrorCode.REFUSED,
                f"expected at most {MAX_ENTRIES:,} blocks; got {count:,}, "
                f"{num_splits:,} splits with {per_split:,} blocks each; reduce "
                f"num_splits, or request fewer envs per server",
            )
        try:
            # Allow unknown wrappers, because only workers import the modules that
            # register them.
            check_wrappers(attach.wrappers, allow_unknown=True)
        except WrapperError as error:
            raise Rejection(ErrorCode.BAD_WRAPPER, str(error)) from None

    def _busy_rejection(
        self, attach: Attach, user: str, client: str, now: float
    ) -> Rejection:
        """Return the rejection of an ATTACH that requests more envs than are free.

        About the leases of other users, it states only the total number of envs.
        """
        free = self.num_free_envs
        spares = ", half of them spares" if attach.spare_envs else ""
        largest_first = sorted(self.values(), key=lambda r: -r.attach.num_hosted)
        visible = [
            r for r in largest_first if r.user == user and (user or r.client == client)
        ]
        parts = [
            f"{r.attach.num_hosted} of {r.attach.env_name} by {r.client} for "
            f"{now - r.attached_at:.0f} s"
            for r in visible[:8]
        ]
        others = sum(r.attach.num_hosted for r in largest_first if r not in visible)
        if others:
            parts.append(f"{others} by others")
        holder, held_ms = "others" if largest_first else "", 0
        if visible and largest_first[0] is visible[0]:
            holder = visible[0].client
            held_ms = int(1000 * (now - visible[0].attached_at))
        return Rejection(
            ErrorCode.ENVS_BUSY,
            f"{counted(attach.num_hosted, 'env')} requested{spares}, {free} of "
            f"{self._settings.total_envs} free (leased: {'; '.join(parts) or 'none'}); "
            f"request fewer envs, close other leases (a lease ends "
            f"{self._settings.lease_seconds:g} s after its client's last message), or "
            f"start the server with larger --workers or --envs-per-worker",
            holder=holder,
            held_ms=held_ms,
        )

    def grant(
        self, record: LeaseRecord, spec: EnvSpec, blocks: Sequence[Block], rows: Rows
    ) -> None:
        """Grant a lease whose envs are built, unless its messages are too large.

        Raises:
          Rejection: The messages of the lease would be too large.
        """
        lease = Lease(
            session=record.session,
            spec=spec,
            blocks=blocks,
            rows=rows,
            settings=record.settings,
            reply_builder=self._reply_builder,
            actions=record.attach.actions,
        )
        granted = Granted(
            epoch=record.number,
            lease_seconds=self._settings.lease_seconds,
            spec=spec,
            blocks=tuple(blocks),
        )
        if lease.max_result_bytes > MAX_RESULT_BYTES:
            raise Rejection(
                ErrorCode.ENV_START_FAILED,
                f"results of {len(rows.reward)} envs need up to "
                f"{lease.max_result_bytes} bytes, but clients accept at most "
                f"{MAX_RESULT_BYTES} bytes per message; request fewer envs per server",
            )
        try:
            record.granted_body = granted.encode()
        except codec.CodecError as error:
            raise Rejection(ErrorCode.ENV_START_FAILED, str(error)) from None
        record.lease, record.row_mib = lease, rows_mib(spec, len(rows.reward))
        record.machine.change_to(LeaseState.GRANTED)

    # Ending leases.

    def close(self, record: LeaseRecord, reason: ErrorBody | None) -> list[Decision]:
        """Start to close a lease; its client is notified when the workers have exited.

        Nothing happens if the lease is CLOSING. After a DETACH, `reason` is None.
        """
        if record.state is LeaseState.CLOSING:
            return []
        record.machine.change_to(LeaseState.CLOSING)
        record.reason = reason
        if self.is_ending and reason is not None:
            self.unnotified.add(record.session)
        if record.lease is not None:
            late = record.lease.num_late_messages
            _LOGGER.debug("%s, closing; ignored late copies: %d", record, late)
            record.lease = None
        return [EndPool(record.session)]

    def close_users(self, users: Collection[str]) -> list[Decision]:
        """End all leases of users whose keys were revoked, and notify the clients."""
        reason = lease_lost(
            "the key of this client was removed or has expired; ask the operator of "
            'the server for an invitation, and run "envserve join"'
        )
        decisions: list[Decision] = []
        for record in self.values():
            if record.user in users and record.reason != reason:  # not notified yet
                # Notify the client now, because its connection will be closed before
                # the workers have exited.
                reply = self._reply_builder.session_ended(record.request, reason)
                decisions += [reply, *self.close(record, reason)]
                self.unnotified.discard(record.session)
                _LOGGER.warning("%s, ended: its key was removed or has expired", record)
        return decisions

    def remove(self, session: SessionId) -> list[Decision]:
        """Free the envs of a lease whose workers have exited, and notify its client."""
        record = self.pop(session)
        record.machine.change_to(LeaseState.ENDED)
        self.ended_sessions.add(session, record.reason)
        reason = record.reason.summary if record.reason else "detached"
        fields = {"fields": {**record.log_fields, "why": reason}}
        text = "%s, ended%s (%s)"
        _LOGGER.info(text, record, record.summary, reason, extra=fields)
        return [
            *([record.audit_event("ended", reason)] if record.granted_body else []),
            self._reply_builder.session_ended(record.request, record.reason),
            *self.start_builds(),
        ]
