"""Acquires a client's lease with HELLO and ATTACH, and a new one after each loss.

Every later lease must have the spaces and blocks of the first one, because the caller
already uses the rows. The envs of a later lease get new seeds. After a loss, the client
changes its session number, sends HELLO and ATTACH again (to the same server, or to
another one after `move_to`), and resets the lost blocks.

`lost_lease` contains the reason for the loss and the time of the next attempt. It
becomes None at the first reply under the new lease or, if no operation is in flight,
when the lease is granted. If the new lease is lost before that, the time limit of the
first loss still applies.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from envserve.envs.seeding import INCARNATIONS_PER_LEASE
from envserve.errors import (
    ConnectError,
    EnvserveError,
    EnvStartError,
    LeaseLost,
    LocalProtocolError,
    ProtocolMismatch,
    RemoteProtocolError,
    ServerError,
    ServerLost,
    UnknownEnv,
)
from envserve.lane import Block, Lane, make_blocks
from envserve.session.client.client_blocks import ClientBlocks
from envserve.session.client.liveness import LostLease, Timeouts
from envserve.session.client.requests import Request, Requests
from envserve.session.states import ClientState, StateMachine
from envserve.settings import EnvRequest, copy_as
from envserve.slab import rows_nbytes
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.text import LogThrottle, did_you_mean
from envserve.wire.bodies import Attach, Granted
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.error_body import ErrorBody, exception_of
from envserve.wire.handshake import Hello, Welcome, check_versions
from envserve.wire.message import Message

_LOGGER: Final = logging.getLogger(__name__)
#: Seconds between two attempts to replace a lost lease.
_RETRY_SECONDS: Final = 0.5
#: Seconds to wait for envs that other clients have leased while this client was silent.
_BUSY_SECONDS: Final = 5.0
#: Seconds without a connection until another server may take over.
_DISCONNECTED_SECONDS: Final = 0.25
#: If the lease is lost: seconds that a message to the server may remain unanswered
#: before another server may take over.
_REPLY_SECONDS: Final = 1.0
#: If the server ignores a request, the search for another server starts this many
#: seconds before the current server counts as lost.
_SEARCH_SECONDS: Final = 3.0
#: Maximum time to wait for a poll of all servers before giving up. A poll takes long if
#: a name server or a network file system does not reply.
_MAX_POLL_SECONDS: Final = 60.0
#: Number of restarts of the server before the first lease that end the session.
_MAX_RESTARTS: Final = 16


class Attachment:
    """The state of a client's lease, across losses and changes of server.

    Attributes:
      address: Address of the current server, for error messages and logs.
      attach: Arguments of the ATTACH requests.
      machine: State of the session; see `ClientState`.
      error: Reason why the session is LOST; None otherwise.
      connect_error: Reason why there is no connection, if the transport found one.
      tried_text: Text with the addresses that the transport has tried for the host
        name; a part of the error if no server replies.
      num_leases: Number of leases granted so far.
      attach_id: Request id of the latest ATTACH.
      client_blocks: The blocks and their operations; None until the first lease.
      lost_lease: The lost lease that is being replaced; None if there is none.
      granted_by: Address of the server that granted the latest lease; "" if none did.
      is_rejected: Whether the client has moved to the current server, which then has
        rejected its ATTACH.
      awaits_poll: Whether to wait until all servers have been polled for free envs, at
        most `_MAX_POLL_SECONDS` longer than otherwise.
      throttle: Limits how often the session logs the same kind of message.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        requests: Requests,
        timeouts: Timeouts,
        client_name: str,
    ) -> None:
        """Start in state CONNECTING; for the arguments see `ClientSession`."""
        self.address = address
        self.machine = StateMachine(ClientState.CONNECTING)
        self.error: EnvserveError | None = None
        self.connect_error: ConnectError | None = None
        self.tried_text = ""
        self.throttle = LogThrottle()
        self.num_leases = self.attach_id = self._num_restarts = 0
        self.client_blocks: ClientBlocks | None = None
        self.lost_lease: LostLease | None = None
        self.granted_by = ""
        self.is_rejected = self.awaits_poll = False
        self.attach, self._requests = attach, requests
        self._timeouts, self._client_name = timeouts, client_name
        self._max_message_bytes, self._env_names = 0, tuple[str, ...]()

    # Attaching.

    def send_hello(self, now: float) -> None:
        """Begin the handshake: send a HELLO, and discard all earlier requests."""
        self._requests.clear()
        self._requests.boot = 0
        # Return a lost lease first, because an interrupt may end this method.
        if self.lost_lease is not None:
            self._requests.send_detach(self.lost_lease.detach_frames)
        self.machine.change_to(ClientState.HELLO_SENT)
        body = Hello(client=self._client_name).encode()
        self._requests.send(Request(MessageType.HELLO, body=body), now)

    def accept_welcome(self, message: Message, now: float) -> None:
        """Send an ATTACH after a WELCOME; abort if the protocols are incompatible."""
        welcome = Welcome.decode(message.body)
        try:
            check_versions(welcome, self.address)
        except ProtocolMismatch as error:
            self.abort(error)
            return
        self._requests.clear()
        self._requests.boot = message.boot
        self._max_message_bytes = welcome.max_message_bytes
        self._env_names = welcome.env_names
        self._send_attach(now)

    @property
    def next_attach(self) -> Attach:
        """The ATTACH of the next lease, with seeds that no earlier lease has used."""
        first = self.attach.first_incarnation + self.num_leases * INCARNATIONS_PER_LEASE
        return copy_as(Attach, self.attach, first_incarnation=first & 0xFFFFFFFF)

    def _send_attach(self, now: float) -> None:
        """Send an ATTACH under the current session number."""
        self.machine.change_to(ClientState.ATTACHING)
        body = self.next_attach.encode()
        request = Request(MessageType.ATTACH, body=body)
        self._requests.send(request, now)
        self.attach_id = request.id

    def accept_grant(self, message: Message, now: float) -> None:
        """Use the lease of a GRANTED message; see `_use_lease`.

        Raises:
          RemoteProtocolError: The rows are too large, or the envs differ from those of
            the first lease.
        """
        granted = Granted.decode(message.body, self.attach.num_envs)
        self._check_usable(granted)
        if self.client_blocks is None:
            self.client_blocks = self._create_blocks(granted.spec, granted.blocks)
        else:
            self.check_same_envs(granted)
        self._requests.remove(self.attach_id)
        self._requests.epoch = granted.epoch
        self._use_lease(self.client_blocks, 1, now)

    def check_same_envs(self, other: Granted | ClientBlocks) -> None:
        """Raise RemoteProtocolError if another lease has other spaces or blocks.

        See the decision "A lane keeps its blocks when it moves to another server".
        """
        previous = self.client_blocks
        assert previous is not None
        mode = self.attach.observation_mode
        different = previous.spec.differences(other.spec, mode)
        old, new = ([(b.start, b.split) for b in x.blocks] for x in (previous, other))
        if old != new:
            text = f"{len(old)} before, {len(new)} with different rows now"
            text += "; start the server with the same number of --workers"
            different.append(f"blocks: {text}")
        if different:
            source = f" from {self.granted_by}" if self.granted_by else ""
            raise RemoteProtocolError(
                f"expected the same envs as before{source}; got different ones: "
                f"{'; '.join(different)}"
            )

    def has_next_seeds(self, other: Attachment) -> bool:
        """Return whether another session's ATTACH has the seeds of `next_attach`."""
        return other.attach.first_incarnation == self.next_attach.first_incarnation

    def adopt_lease(self, other: Attachment, now: float) -> None:
        """Use the lease that the same server has granted to another session.

        Call this after `move_to`. The other session ends, but does not send a DETACH.
        """
        assert self.client_blocks is not None
        self._requests.adopt_session(other._requests)
        self.attach_id = other.attach_id
        self._max_message_bytes = other._max_message_bytes
        text = f"{self.address}: another session has taken over the envs"
        other.fail(LocalProtocolError(text))
        self.machine.change_to(ClientState.ATTACHING)
        self._use_lease(self.client_blocks, other.num_leases, now)

    def _use_lease(
        self, client_blocks: ClientBlocks, num_leases: int, now: float
    ) -> None:
        """Change to READY, and send the requests that are in flight."""
        self.granted_by = self.address
        self.num_leases += num_leases
        self.machine.change_to(ClientState.READY)
        if self.lost_lease is not None:
            level = logging.WARNING if self.num_leases > 1 else logging.INFO
            text = "granted a new lease after a loss"
            if (more := self.throttle.admit("lease", now)) is not None:
                _LOGGER.log(level, "%s: %s%s", self.address, text, more)
            if self.lost_lease.stalled_address != self.address:
                if self.lost_lease.give_up_error is not None:
                    self.lost_lease.lost_at = now  # if it is lost, wait again
                self.lost_lease.give_up_error = None
            if not client_blocks.in_flight:
                self.lost_lease = None
        # Send each request once, although a call can be in flight on several blocks.
        in_flight = client_blocks.in_flight.values()
        for request in {id(request): request for request in in_flight}.values():
            self._requests.send(request, now)

    def _create_blocks(self, spec: EnvSpec, blocks: tuple[Block, ...]) -> ClientBlocks:
        """Create the blocks of the first lease, which later leases must have, too."""
        per_split = sum(block.split == 0 for block in blocks)
        self.attach = copy_as(Attach, self.attach, blocks_per_split=per_split)
        liveness, autoreset = self._requests.liveness, self.attach.autoreset
        return ClientBlocks(self.address, spec, blocks, liveness, autoreset)

    def _check_usable(self, granted: Granted) -> None:
        num_envs = self.attach.num_envs
        needed = num_envs * sum(leaf.nbytes for leaf in granted.spec.action_leaves)
        if needed > self._max_message_bytes:
            raise RemoteProtocolError(
                f"the actions of {num_envs} envs need {needed} bytes, but the server "
                f"accepts at most {self._max_message_bytes} bytes per message; start "
                f"it with a larger --max-message-mib"
            )
        needed, limit = rows_nbytes(granted.spec, num_envs), self._timeouts.max_row_mib
        if needed > limit * (1 << 20):  # the limit may be infinite
            raise RemoteProtocolError(
                f"the rows of {num_envs} envs need {needed >> 20} MiB, but max_row_mib "
                f"is {limit}; raise max_row_mib if you expect such large envs"
            )

    # Losing a lease, and replacing it.

    @property
    def is_recovering(self) -> bool:
        """Whether the lease is lost and no new one has been granted yet."""
        is_ready = self.machine.state is ClientState.READY
        return self.lost_lease is not None and not is_ready

    def lose_lease(
        self, error: EnvserveError, now: float, *, may_hold_lease: bool = True
    ) -> None:
        """Mark all envs as lost, and request a new lease under a new session number.

        Args:
          error: Reason for the loss.
          now: Monotonic seconds.
          may_hold_lease: Whether the server may still hold the old lease. If so, a
            DETACH is sent.
        """
        if self.client_blocks is None:
            raise LocalProtocolError(f"{self.address}: no lease has been granted yet")
        # A faulty server may end the lease at every step.
        if (more := self.throttle.admit("loss", now)) is not None:
            _LOGGER.warning("%s; requesting a new lease%s", error, more)
        requests, previous = self._requests, self.lost_lease
        detach_frames = requests.pack(MessageType.DETACH) if may_hold_lease else []
        if previous is not None and not requests.boot:
            # No envs were requested since the previous loss. If an interrupt has ended
            # that call of this method, its DETACH was not sent.
            detach_frames = previous.detach_frames
        # If the server was already silent (an interrupted call may have been waiting
        # for its reply), the loss is dated back to the beginning of the silence.
        since = min(requests.liveness.silent_since, now)
        loss = LostLease(error, since, requests.boot, detach_frames=detach_frames)
        self.lost_lease = loss
        self.client_blocks.mark_lost(error)
        requests.change_session()
        if previous is None:
            self.send_hello(now)
        else:  # the previous lost lease is not replaced yet: wait before a retry
            loss.lost_at, loss.give_up_error = previous.lost_at, previous.give_up_error
            loss.stalled_address = previous.stalled_address
            loss.retry_at = now + _RETRY_SECONDS
            self.machine.change_to(ClientState.HELLO_SENT)
            requests.send_detach(loss.detach_frames)

    def handle_restart(self, now: float) -> None:
        """Handle a restart of the server, which a new boot id has revealed."""
        if self.machine.state is ClientState.CLOSING:
            self.close()
        elif self.client_blocks is None:  # there was no lease to lose
            self._num_restarts += 1
            if self._num_restarts == _MAX_RESTARTS:
                text = f"the server was restarted {_MAX_RESTARTS} times before it "
                text += "granted the envs; read its log"
                self.abort(ServerError(f"{self.address}: {text}"))
                return
            self._requests.change_session()
            self.send_hello(now)
        else:
            text = f"{self.address}: the server was restarted, so its envs are gone"
            self.lose_lease(ServerLost(text), now, may_hold_lease=False)

    def retry(self, now: float) -> None:
        """Send HELLO or ATTACH again if a retry is due."""
        loss = self.lost_lease
        if loss is None or now < loss.retry_at:
            return
        loss.retry_at = math.inf
        if self.machine.state is ClientState.ATTACHING:
            # Keep the session number, because the server may still grant a late copy of
            # the rejected ATTACH.
            self._send_attach(now)
        elif self.machine.state is ClientState.HELLO_SENT:
            self.send_hello(now)
        self._requests.send_detach(loss.detach_frames)

    def handle_error(self, body: ErrorBody, now: float) -> None:
        """Handle an ERROR that ends the session or rejects an ATTACH.

        A lost lease is requested again. A rejection is fatal, unless the client is
        replacing a lost lease and the reason may be temporary.
        """
        error = exception_of(body, self.address)
        if isinstance(error, UnknownEnv):
            hint = did_you_mean(self.attach.env_name, self._env_names)
            if not hint.endswith("?"):
                hint += "; to offer another env, restart the server with its name, "
                hint += "such as `envserve start my_env.py:MyEnv`, and with --import "
                hint += "MODULE if a module registers it"
            error = UnknownEnv(f"{error}{hint}")
        is_lost = body.code in (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
        is_temporary = body.code in (ErrorCode.ENVS_BUSY, ErrorCode.INTERNAL) or (
            # The server lacked a resource, such as memory.
            body.code is ErrorCode.ENV_START_FAILED and body.executed is Executed.NO
        )
        if self.client_blocks is not None and is_lost:
            self.lose_lease(error, now)
        elif self.lost_lease is None or not (self.is_recovering and is_temporary):
            self.abort(error)
        else:
            self._schedule_retry(self.lost_lease, body, error, now)

    def _schedule_retry(
        self, loss: LostLease, body: ErrorBody, error: EnvserveError, now: float
    ) -> None:
        """Schedule the next ATTACH; fail if other clients keep the envs.

        Retrying helps after a restart, when other clients may have attached first, and
        while a server drains, because another one may replace it. If the lease expired
        because this client was silent, the clients that now have the envs keep them.
        With `Timeouts.pads_lost_rows`, retry nevertheless.
        """
        is_full = body.code is ErrorCode.ENVS_BUSY and not body.is_draining
        if (
            is_full
            and isinstance(loss.error, LeaseLost)
            and self._requests.boot == loss.boot
            and not self._timeouts.pads_lost_rows
        ):
            loss.busy_until = min(loss.busy_until, now + _BUSY_SECONDS)
            if now >= loss.busy_until:
                text = f"{loss.error}; other clients have the envs now: {error}"
                self.fail(LeaseLost(text))
                return
        self._requests.clear()
        loss.rejection = str(error).removeprefix(f"{self.address}: ")
        if body.is_draining:  # when the server stops, it waits for this confirmation
            self._requests.send_detach(self._requests.pack(MessageType.DETACH))
        if body.code is not ErrorCode.ENVS_BUSY:  # the server has ended this session
            self._requests.change_session()
            self.machine.change_to(ClientState.HELLO_SENT)
        loss.retry_at = now + _RETRY_SECONDS

    @property
    def give_up_at(self) -> float:
        """Time at which to call `give_up`, in monotonic seconds."""
        return self._loss_deadline + (_MAX_POLL_SECONDS if self.awaits_poll else 0.0)

    @property
    def _loss_deadline(self) -> float:
        """Time at which the server or the lease counts as lost for good."""
        since, loss = self._requests.liveness.silent_since, self.lost_lease
        state, timeouts = self.machine.state, self._timeouts
        if state.has_envs:
            return min(since + timeouts.lost_seconds, self._stalled[0])
        if loss is None:
            return since + timeouts.connect_seconds
        if loss.give_up_error is not None:
            return math.inf
        deadline = loss.lost_at + timeouts.lost_seconds
        if state is ClientState.ATTACHING and loss.retry_at == math.inf:
            # Building envs may take a long time; wait as long as the server reports
            # progress.
            min_silence = min(timeouts.connect_seconds, timeouts.lost_seconds)
            max_duration = max(timeouts.operation_seconds, timeouts.lost_seconds)
            return min(max(deadline, since + min_silence), loss.lost_at + max_duration)
        return deadline

    @property
    def _stalled(self) -> tuple[float, Request | None]:
        """Next time at which a request becomes overdue, and this request.

        The server then counts as lost, even if it replies to PINGs. Without unanswered
        requests, the time is infinity and the request None.
        """
        is_ready = self.machine.state is ClientState.READY
        return self._requests.stalled(self._timeouts) if is_ready else (math.inf, None)

    def give_up(self, now: float) -> None:
        """Handle a server that was silent, or a lease that was lost, for too long.

        Fail the session or, with `Timeouts.pads_lost_rows`, set
        `LostLease.give_up_error` and continue to request a lease.
        """
        if self.client_blocks is None:
            self.fail(
                self.connect_error
                or ConnectError(
                    f"{self.address}: no server replied within "
                    f"{self._timeouts.connect_seconds:g} s{self.tried_text}; check "
                    f"that `envserve start --bind {self.address}` is running there, "
                    f"and that this client can reach it over the network"
                )
            )
            return
        loss, state = self.lost_lease, self.machine.state
        stalled_at, stalled = self._stalled
        is_stalled, since = now >= stalled_at, math.inf
        if stalled is not None and is_stalled:
            text, since = stalled.describe_stall(now), stalled.sent_at
        elif loss is None or state.has_envs:
            text = self._requests.liveness.describe(now) or "no reply"
        else:
            # The loss may be long past, so the text begins with the current state.
            current = self._requests.liveness.describe(now) or loss.rejection
            text = f"no new envs for {now - loss.lost_at:.0f} s after the loss of the "
            text += f"lease ({str(loss.error).removeprefix(f'{self.address}: ')})"
            text = f"{current}; {text}" if current else text
            since = loss.lost_at
        is_slow = now >= since + self._timeouts.operation_seconds
        limit = "operation_timeout" if is_slow else "server_lost_after"
        error = ServerLost(
            f"{self.address}: {text}, so the server counts as lost; check it with "
            f"`envserve health {self.address}`, read its log, or raise {limit}"
        )
        if not self._timeouts.pads_lost_rows or state is ClientState.CLOSING:
            self.fail(error)
            return
        _LOGGER.warning("%s; its rows are padding until it grants a new lease", error)
        if loss is None or state.has_envs:
            self.lose_lease(error, now)
        if self.lost_lease is not None:
            self.lost_lease.give_up_error = error
            self.lost_lease.stalled_address = self.address if is_stalled else ""
        self.client_blocks.give_up(error)

    # Changing servers. Blocks, rows and operations in flight are kept.

    def start_vacant(self, like: Lane, now: float) -> None:
        """Start without a server; all envs count as lost.

        The spaces and the number of blocks per split are those of the lane `like`.
        """
        per_split = sum(block.split == 0 for block in like.blocks)
        blocks = make_blocks(self.attach.num_envs, per_split, self.attach.num_splits)
        error = ServerLost("no server is available for these rows yet")
        self.client_blocks = self._create_blocks(like.spec, blocks)
        self.client_blocks.mark_lost(error)
        self.lost_lease = LostLease(error, now, give_up_error=error)

    def needs_server_since(self, now: float) -> float | None:
        """Return the time since which another server is needed; None if it is not."""
        liveness, loss = self._requests.liveness, self.lost_lease
        since = min(liveness.silent_since, liveness.disconnected_since)
        is_isolated = now > liveness.disconnected_since + _DISCONNECTED_SECONDS
        if loss is None or not self.is_recovering:
            is_ready = self.machine.state is ClientState.READY
            if is_ready and (is_isolated or liveness.is_unreachable):
                return since
            seconds = min(_SEARCH_SECONDS, self._timeouts.operation_seconds / 2)
            search_at = self._stalled[0] - seconds
            return search_at if now >= search_at else None
        must_retry = self.is_rejected or loss.retry_at < math.inf
        is_silent = is_isolated or now > liveness.silent_since + _REPLY_SECONDS
        return min(since, loss.lost_at) if must_retry or is_silent else None

    def move_to(self, address: str, now: float, reason: str = "") -> None:
        """Change to another server, under a new session number.

        The caller sends DETACH to the previous server, which may still hold the lease.
        The default reason is that the previous server is unresponsive.
        """
        _LOGGER.warning(
            "%s: requesting envs to replace those of %s", address, self.address
        )
        # The new server is not responsible for the previous one's silence.
        self._requests.liveness.record_message(now)
        self._requests.liveness.record_connect()
        if self.machine.state is ClientState.READY:
            text = reason or "the server is gone, or was silent for too long"
            stalled_at, request = self._stalled
            if request is not None and now >= stalled_at - _SEARCH_SECONDS:
                text = request.describe_stall(now)
            self.lose_lease(ServerLost(f"{self.address}: {text}"), now)
        assert self.client_blocks is not None
        assert self.lost_lease is not None
        self.lost_lease.retry_at, self.lost_lease.detach_frames = math.inf, []
        self.address = self.client_blocks.address = address
        self.is_rejected = False
        self._requests.change_session()
        if self.machine.state is not ClientState.CONNECTING:
            self.send_hello(now)

    # Ending the session.

    def detach(self, now: float) -> None:
        """Discard all operations, and return the envs to the server.

        The state changes last, so an interrupted call can be repeated.
        """
        self._requests.clear()
        if self.client_blocks is not None:
            self.client_blocks.discard_all()
        if self.lost_lease is not None:  # its DETACH may not have been sent yet
            self._requests.send_detach(self.lost_lease.detach_frames)
        if self.machine.state in (ClientState.ATTACHING, ClientState.READY):
            self._requests.send(Request(MessageType.DETACH), now)
            self.machine.change_to(ClientState.CLOSING)
        else:
            self.machine.change_to(ClientState.CLOSED)
        self.lost_lease = None

    def close(self) -> None:
        """Change to CLOSED, because the envs were returned to the server."""
        self._requests.clear()
        self.machine.change_to(ClientState.CLOSED)

    def fail(self, error: EnvserveError) -> None:
        """Change to LOST; all operations in flight end with the error."""
        self.machine.change_to(ClientState.LOST)
        self.error = error
        self.lost_lease = None
        self._requests.clear()
        if self.client_blocks is not None:
            self.client_blocks.fail_all(error)

    def abort(self, error: EnvserveError) -> None:
        """Change to LOST, and send a DETACH, because the server may hold a lease.

        If the session was moving to this server from another one, the session does not
        end: the server is only marked as rejected. If the session has already ended,
        nothing changes.
        """
        if self.machine.state.is_over:
            return
        detach_frames = self._requests.pack(MessageType.DETACH)
        if self.lost_lease is not None and self.address != self.granted_by:
            _LOGGER.warning("%s; waiting for another server", error)
            self.lost_lease.error, self.lost_lease.retry_at = error, math.inf
            self.is_rejected = True
            self._requests.change_session()
            self.machine.change_to(ClientState.HELLO_SENT)
        else:
            self.fail(error)
        self._requests.send_detach(detach_frames)


def attach_of(request: EnvRequest, address: str) -> Attach:
    """Return the ATTACH for a request; raise EnvStartError if it cannot be encoded."""
    attach = copy_as(Attach, request)
    # These numbers need more bytes in an ATTACH for a later lease.
    longest = {"first_incarnation": 0xFFFFFFFF, "blocks_per_split": request.num_envs}
    try:
        copy_as(Attach, attach, **longest).encode()
    except codec.CodecError as error:
        raise EnvStartError(f"{address}: env_kwargs or wrappers: {error}") from None
    return attach
