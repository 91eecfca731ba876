"""How a client gets its envs, and gets them anew after each loss: HELLO, then ATTACH.

What it gets later has the shape of what it got first, and seeds of its own. A loss
lasts until a lease serves: until something was answered under it, or nothing waits.
"""

from __future__ import annotations

import logging
import math
from dataclasses import fields, replace
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
    ServerLost,
    UnknownEnv,
)
from envserve.lane import Block, Lane, make_blocks
from envserve.session.client.client_blocks import ClientBlocks
from envserve.session.client.liveness import LostLease, Timeouts
from envserve.session.client.requests import Request, Requests
from envserve.session.states import ClientState, Machine
from envserve.settings import EnvRequest
from envserve.slab import rows_nbytes
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.text import did_you_mean
from envserve.wire.bodies import Attach, Granted
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import (
    ErrorBody,
    Hello,
    Welcome,
    check_versions,
    exception_of,
)
from envserve.wire.message import Buffer, Message

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 0.5
#: How long others may have the envs of a lease that was lost by our own silence.
_BUSY_SECONDS: Final = 5.0
#: Seconds without a connection after which another server is looked for.
_DISCONNECTED_SECONDS: Final = 0.25
#: Seconds that a server which has lost our envs may take to answer, before that.
_ANSWER_SECONDS: Final = 1.0


class Attachment:
    """A client's claim to its envs.

    Attributes:
      address: The server's, for messages.
      attach: Which envs to ask for.
      machine: Where it is, see `ClientState`.
      error: Why it is LOST.
      refusal: Why there is no connection, if who looks after that knows.
      num_leases: How many leases were granted.
      request: Number of the last ATTACH.
      operations: What the envs are up to; None until they are granted.
      loss: What has to be got over; None if all is well.
      granted_by: Address of the server that granted the last lease; "" without one.
      is_rejected: Whether the present server refused to give envs in place of another.
      awaits_poll: Whether the servers have to be polled first, to find another one.
    """

    def __init__(
        self,
        address: str,
        attach: Attach,
        requests: Requests,
        timeouts: Timeouts,
        client: str,
    ) -> None:
        """Starts CONNECTING; the arguments are those of `ClientSession`."""
        self.address = address
        self.machine = Machine(ClientState.CONNECTING)
        self.error: EnvserveError | None = None
        self.refusal: ConnectError | None = None
        self.num_leases = self.request = 0
        self.operations: ClientBlocks | None = None
        self.loss: LostLease | None = None
        self.granted_by, self.is_rejected, self.awaits_poll = "", False, False
        self.attach, self._requests = attach, requests
        self._timeouts, self._client = timeouts, client
        self._max_message_bytes, self._env_names = 0, tuple[str, ...]()

    # Asking.

    def send_hello(self, now: float) -> None:
        """Begins from the beginning."""
        self._requests.clear()
        self._requests.boot = 0
        self.machine.move(ClientState.HELLO_SENT)
        body = Hello(client=self._client).encode()
        self._requests.send(Request(MessageType.HELLO, body=body), now)

    def accept_welcome(self, message: Message, now: float) -> None:
        """Goes on to ATTACH, if the server speaks our version."""
        welcome = Welcome.decode(message.body)
        try:
            check_versions(welcome, self.address)
        except ProtocolMismatch as error:
            self.refuse(error)
            return
        self._requests.clear()
        self._requests.boot = message.boot
        self._max_message_bytes = welcome.max_message_bytes
        self._env_names = welcome.env_names
        self._ask_for_envs(now)

    def _ask_for_envs(self, now: float) -> None:
        """Sends an ATTACH, as the present session."""
        self.machine.move(ClientState.ATTACHING)
        body = attach_again(self.attach, self.num_leases).encode()
        request = Request(MessageType.ATTACH, body=body)
        self._requests.send(request, now)
        self.request = request.id

    def accept_grant(self, message: Message, now: float) -> None:
        """Becomes READY; sends what is in flight.

        Raises:
          RemoteProtocolError: They are not envs that we can use.
        """
        granted = Granted.decode(message.body, self.attach.num_envs)
        self._check_usable(granted)
        if self.operations is None:
            self.operations = self._envs_of(granted.spec, granted.blocks)
        else:
            _check_equal(granted, self.operations, self.granted_by)
            self.operations.is_vacant = False
        self.granted_by = self.address
        self._requests.remove(self.request)
        self._requests.epoch = granted.epoch
        self.num_leases += 1
        self.machine.move(ClientState.READY)
        in_flight = self.operations.in_flight
        if self.loss is not None:
            _LOGGER.info("%s: it has given envs anew", self.address)
            self.loss.given_up = None
            if not in_flight:
                self.loss = None
        # Since the loss there is one per block; but calls that were not sent.
        for request in {id(each): each for each in in_flight.values()}.values():
            self._requests.send(request, now)

    def _envs_of(self, spec: EnvSpec, blocks: tuple[Block, ...]) -> ClientBlocks:
        """Returns what the first envs are up to; later ones are asked to be cut so."""
        each = sum(block.split == 0 for block in blocks)
        self.attach = replace(self.attach, blocks_per_split=each)
        return ClientBlocks(self.address, spec, blocks, self._requests.liveness)

    def _check_usable(self, granted: Granted) -> None:
        num_envs = self.attach.num_envs
        needed = num_envs * sum(leaf.nbytes for leaf in granted.spec.action_leaves)
        if needed > self._max_message_bytes:
            raise RemoteProtocolError(
                f"actions of {num_envs} envs need {needed} bytes, and the server "
                f"accepts {self._max_message_bytes} at once; start it with a larger "
                f"--max-message-mib"
            )
        needed, most = rows_nbytes(granted.spec, num_envs), self._timeouts.max_row_mib
        if needed > most << 20:
            raise RemoteProtocolError(
                f"rows of {num_envs} envs need {needed >> 20} MiB, and max_row_mib is "
                f"{most}; raise it if these are the envs that you want"
            )

    # Losing envs, and asking again.

    @property
    def is_recovering(self) -> bool:
        """Whether envs are lost, and no new lease is granted yet."""
        return self.loss is not None and self.machine.state is not ClientState.READY

    def lose_lease(
        self, error: EnvserveError, now: float, *, may_hold_lease: bool = True
    ) -> None:
        """Asks for envs anew, as another session, since those that we had are lost.

        Args:
          error: What has happened.
          now: Monotonic seconds.
          may_hold_lease: Whether the server may still hold the old lease.
        """
        if self.operations is None:
            raise LocalProtocolError(f"{self.address}: expected envs to lose")
        _LOGGER.warning("%s; asking for envs anew", error)
        requests, before = self._requests, self.loss
        farewell = requests.pack(MessageType.DETACH) if may_hold_lease else []
        # Earlier, if a call is interrupted in a silence.
        since = min(requests.liveness.silent_since, now)
        self.loss = LostLease(error, since, farewell=farewell)
        self.operations.mark_lost(str(error), error)
        requests.change_session()
        if before is None:
            self.send_hello(now)
        else:  # in vain, so far: then not all too often
            self.loss.since, self.loss.given_up = before.since, before.given_up
            self.loss.retry_at = now + _RETRY_SECONDS
            self.machine.move(ClientState.HELLO_SENT)
        requests.say_farewell(self.loss.farewell)

    def handle_restart(self, now: float) -> None:
        """Handles a server that is another than the one we spoke to."""
        if self.machine.state is ClientState.CLOSING:
            self.close()
        elif self.operations is None:  # nothing is lost yet
            self._requests.change_session()
            self.send_hello(now)
        else:
            error = ServerLost(
                f"{self.address}: the server was restarted, and its envs with it"
            )
            self.lose_lease(error, now, may_hold_lease=False)

    def retry(self, now: float) -> None:
        """Asks again, if it is time to."""
        loss = self.loss
        if loss is None or now < loss.retry_at:
            return
        loss.retry_at = math.inf
        if self.machine.state is ClientState.ATTACHING:
            # As the same session: a late copy of what was refused may get the envs.
            self._ask_for_envs(now)
        elif self.machine.state is ClientState.HELLO_SENT:
            self.send_hello(now)
        self._requests.say_farewell(loss.farewell)

    def accept_refusal(self, body: ErrorBody, now: float) -> None:
        """Takes an ERROR that ends the session, or does not let it begin."""
        error = exception_of(body, self.address)
        if isinstance(error, UnknownEnv):
            hint = did_you_mean(self.attach.env_name, self._env_names)
            error = UnknownEnv(f"{error}{hint}")
        is_lost = body.code in (ErrorCode.LEASE_LOST, ErrorCode.FENCED)
        may_pass = body.code in (ErrorCode.ENVS_BUSY, ErrorCode.INTERNAL)
        if self.operations is not None and is_lost:
            self.lose_lease(error, now)
        elif self.loss is None or not (self.is_recovering and may_pass):
            self.refuse(error)
        else:
            self._wait_for_envs(self.loss, body, error, now)

    def _wait_for_envs(
        self, loss: LostLease, body: ErrorBody, error: EnvserveError, now: float
    ) -> None:
        """Plans when to ask again, unless the envs are somebody else's for good.

        After a restart others may have been served first, and a server that drains is
        followed by another; but what our own silence has lost is not given back.
        """
        is_full = body.code is ErrorCode.ENVS_BUSY and not body.is_draining
        if (
            is_full
            and isinstance(loss.error, LeaseLost)
            and self.address == self.granted_by
        ):
            loss.busy_until = min(loss.busy_until, now + _BUSY_SECONDS)
            if now >= loss.busy_until:
                self.fail(LeaseLost(f"{loss.error}; and others have them: {error}"))
                return
        self._requests.clear()
        if body.code is not ErrorCode.ENVS_BUSY:  # it remembers how this session ended
            self._requests.change_session()
            self.machine.move(ClientState.HELLO_SENT)
        loss.retry_at = now + _RETRY_SECONDS

    @property
    def lost_at(self) -> float:
        """When to `give_up`."""
        if self.awaits_poll:
            return math.inf
        since, loss = self._requests.liveness.silent_since, self.loss
        state, timeouts = self.machine.state, self._timeouts
        if state.has_envs:
            return since + timeouts.lost_seconds
        if loss is None:
            return since + timeouts.connect_seconds
        if loss.given_up is not None:
            return math.inf
        lost_at = loss.since + timeouts.lost_seconds
        if state is ClientState.ATTACHING and loss.retry_at == math.inf:
            # The server is building: that may take as long as it says so.
            least = min(timeouts.connect_seconds, timeouts.lost_seconds)
            return max(lost_at, since + least)
        return lost_at

    def give_up(self, now: float) -> None:
        """Handles a server that is silent, or envs that are lost, for too long."""
        if self.operations is None:
            self.fail(
                self.refusal
                or ConnectError(
                    f"{self.address}: no server answered within "
                    f"{self._timeouts.connect_seconds:g} s; is `envserve start --bind "
                    f"{self.address}` running there, and can it be reached?"
                )
            )
            return
        loss, state = self.loss, self.machine.state
        if loss is None or state.has_envs:
            silence = max(0.0, now - self._requests.liveness.silent_since)
            what = f"no answer for {silence:.0f} s"
        else:
            what = f"its envs are lost for {now - loss.since:.0f} s ({loss.error})"
        error = ServerLost(
            f"{self.address}: {what}, so it is given up; look at the server's log, or "
            f"raise server_lost_after"
        )
        if not self._timeouts.pads or state is ClientState.CLOSING:
            self.fail(error)
            return
        _LOGGER.warning("%s; its rows are padding until it is back", error)
        if loss is None or state.has_envs:
            self.lose_lease(error, now)
        if self.loss is not None:
            self.loss.given_up = error

    # Other servers: what is in flight, the blocks and their rows stay as they are.

    def start_vacant(self, like: Lane, now: float) -> None:
        """Begin without a server, as if envs like those of another lane were lost."""
        each = sum(block.split == 0 for block in like.blocks)
        blocks = make_blocks(self.attach.num_envs, each, self.attach.num_splits)
        error = ServerLost("no server has come for these rows yet")
        self.operations = self._envs_of(like.spec, blocks)
        self.operations.is_vacant = True
        self.operations.mark_lost(str(error), error)
        self.loss = LostLease(error, now, given_up=error)

    def needs_server_since(self, now: float) -> float | None:
        """Return since when another server is needed; None if it is not."""
        liveness, loss = self._requests.liveness, self.loss
        since = min(liveness.silent_since, liveness.disconnected_since)
        is_alone = now > liveness.disconnected_since + _DISCONNECTED_SECONDS
        if loss is None or not self.is_recovering:
            is_ready = self.machine.state is ClientState.READY
            return since if is_ready and (is_alone or liveness.is_unreachable) else None
        is_refused = self.is_rejected or loss.retry_at < math.inf
        is_silent = is_alone or now > liveness.silent_since + _ANSWER_SECONDS
        return min(since, loss.since) if is_refused or is_silent else None

    def move_to(self, address: str, now: float) -> list[Buffer]:
        """Change to another server, under another session number.

        Returns:
          The message that gives the lease of the previous server back.
        """
        _LOGGER.warning("%s: asked for envs in place of %s", address, self.address)
        farewell = self._requests.pack(MessageType.DETACH)
        self._requests.liveness.note_message(
            now
        )  # the silence was the previous server's
        self._requests.liveness.note_connected()
        if self.machine.state is ClientState.READY:
            text = f"{self.address}: it is gone, or silent for too long"
            self.lose_lease(ServerLost(text), now)
        assert self.operations is not None
        assert self.loss is not None
        self.loss.retry_at, self.loss.farewell = math.inf, []
        self.address = self.operations.address = address
        self.is_rejected = False
        self._requests.change_session()
        if self.machine.state is not ClientState.CONNECTING:
            self.send_hello(now)
        return farewell

    # How it ends.

    def give_back(self, now: float) -> None:
        """Forgets all, and tells the server that the envs are not needed."""
        self.loss = None
        self._requests.clear()
        if self.operations is not None:
            self.operations.forget()
        if self.machine.state in (ClientState.ATTACHING, ClientState.READY):
            self.machine.move(ClientState.CLOSING)
            self._requests.send(Request(MessageType.DETACH), now)
        else:
            self.machine.move(ClientState.CLOSED)

    def close(self) -> None:
        """Ends it, since the server has the envs."""
        self._requests.clear()
        self.machine.move(ClientState.CLOSED)

    def fail(self, error: EnvserveError) -> None:
        """Ends it with an error, which all that is in flight gets."""
        self.machine.move(ClientState.LOST)
        self.error = error
        self.loss = None
        self._requests.clear()
        if self.operations is not None:
            self.operations.fail_all(error)

    def refuse(self, error: EnvserveError) -> None:
        """Ends it likewise, and tells the server, which may think that it goes on.

        A server that was asked in another's place is only asked no more.
        """
        farewell = self._requests.pack(MessageType.DETACH)
        if self.loss is not None and self.address != self.granted_by:
            _LOGGER.warning("%s; another server is looked for", error)
            self.loss.error, self.loss.retry_at = error, math.inf
            self.is_rejected = True
            self._requests.change_session()
            self.machine.move(ClientState.HELLO_SENT)
        else:
            self.fail(error)
        self._requests.say_farewell(farewell)


def _check_equal(granted: Granted, before: ClientBlocks, home: str) -> None:
    """Refuses other envs than before: rows have their shapes and places.

    docs/decisions.md: "A lane keeps its blocks when it moves to another server".
    """
    different = list(before.spec.differences(granted.spec))
    cuts, now = ([(b.start, b.split) for b in of.blocks] for of in (before, granted))
    if cuts != now:
        text = f"{len(cuts)} before, {len(now)} other ones now"
        different.append(f"blocks: {text}; start the server with as many --workers")
    if different:
        raise RemoteProtocolError(
            f"expected envs as before{home and f', of {home}'}; got other ones: "
            f"{'; '.join(different)}"
        )


def attach_again(attach: Attach, num_leases: int) -> Attach:
    """Returns what to ask for after so many leases: the same, with other seeds."""
    first = attach.first_incarnation + num_leases * INCARNATIONS_PER_LEASE
    return replace(attach, first_incarnation=first & 0xFFFFFFFF)


def attach_of(request: EnvRequest, address: str) -> Attach:
    """Returns what asks for envs; raises EnvStartError if that cannot be sent."""
    attach = Attach(**{f.name: getattr(request, f.name) for f in fields(EnvRequest)})
    try:
        attach.encode()
    except codec.CodecError as error:
        raise EnvStartError(f"{address}: env_kwargs or wrappers: {error}") from None
    return attach
