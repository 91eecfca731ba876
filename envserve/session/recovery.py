"""How a client gets over a loss: how long it waits, what it takes back, when it asks.

A loss lasts until something was answered under a new lease. Whatever is done about it
may be cut short by an interrupt at any line, and is completed by the next call.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

from envserve.errors import (
    ConnectError,
    EnvserveError,
    LeaseLost,
    LocalProtocolError,
    ServerLost,
)
from envserve.session.attachment import Attachment
from envserve.session.sender import Sender
from envserve.session.states import ClientState
from envserve.session.translation import exception_of
from envserve.wire import Buffer, ErrorBody, ErrorCode, MessageType

__all__ = ["Loss", "Recovery"]

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 0.5
#: How long others may have the envs of a lease that was lost by our own silence.
_BUSY_SECONDS: Final = 5.0


@dataclass(slots=True)
class Loss:
    """A lease that was lost.

    Attributes:
      error: What has happened.
      since: When.
      has_begun: Whether all is taken back that was in flight.
      is_hopeless: Whether that is so long ago that nobody should wait for it.
      retry_at: When to ask again.
      busy_until: How long to ask though others have the envs.
      farewell: Tells the server that the old lease is not needed; may be None.
    """

    error: EnvserveError
    since: float
    has_begun: bool = False
    is_hopeless: bool = False
    retry_at: float = math.inf
    busy_until: float = math.inf
    farewell: list[Buffer] | None = None

    def plan_retry(self, now: float) -> None:
        """Sets when to ask again."""
        self.retry_at = now + _RETRY_SECONDS

    def is_taken(self, now: float) -> bool:
        """Tells, each time that the server has no room, whether to give up."""
        if not isinstance(self.error, LeaseLost):
            return False  # a restarted server may have served others first
        if self.busy_until == math.inf:
            self.busy_until = now + _BUSY_SECONDS
        return now >= self.busy_until


class Recovery:
    """What a client does about silence, and about envs that are lost.

    Attributes:
      loss: What has to be got over; None if all is well.
    """

    def __init__(
        self,
        attachment: Attachment,
        sender: Sender,
        *,
        timeout_seconds: float,
        lost_after_seconds: float,
        pads_when_lost: bool,
    ) -> None:
        """Starts with nothing lost; the arguments are those of `ClientSession`."""
        self.loss: Loss | None = None
        self._attachment = attachment
        self._sender = sender
        self._timeout = timeout_seconds
        self._lost_after = lost_after_seconds
        self._pads_when_lost = pads_when_lost

    @property
    def is_under_way(self) -> bool:
        """Whether envs are lost, and no new lease is granted yet."""
        return self.loss is not None and (
            self._attachment.state is not ClientState.READY
        )

    # Waiting.

    @property
    def go_on_at(self) -> float:
        """When to `go_on`: at once with what an interrupt has cut short."""
        if self.loss is None:
            return math.inf
        if not self.loss.has_begun or self._is_cut_short(self.loss):
            return self.loss.since
        return math.inf if self._state is ClientState.READY else self.loss.retry_at

    def _is_cut_short(self, loss: Loss) -> bool:
        """Whether nothing is asked, nor will be."""
        return (
            self._state.is_asking
            and not len(self._sender.requests)
            and loss.retry_at == math.inf
        )

    @property
    def lost_at(self) -> float:
        """When to `give_up`."""
        since, loss, state = self._sender.silence.since, self.loss, self._state
        if loss is None or state.has_envs:
            patience = self._lost_after if state.has_envs else self._timeout
            return math.inf if since is None else since + patience
        if loss.is_hopeless:
            return math.inf
        lost_at = loss.since + self._lost_after
        if state is ClientState.ATTACHING and loss.retry_at == math.inf:
            # The server is building: that may take as long as it says so.
            patience = min(self._timeout, self._lost_after)
            return math.inf if since is None else max(lost_at, since + patience)
        return lost_at

    def give_up(self, now: float) -> None:
        """Handles a server that is silent, or envs that are lost, for too long."""
        address, loss = self._attachment.address, self.loss
        if self._attachment.operations is None:
            self._attachment.lose(
                ConnectError(
                    f"{address}: no server answered within {self._timeout:g} s; is "
                    f"`envserve start --bind {address}` running there, and can it be "
                    f"reached?"
                )
            )
            return
        is_silent = loss is None or self._state.has_envs
        if loss is None or is_silent:
            silence = now - (self._sender.silence.since or now)
            what = f"no answer for {silence:.0f} s"
        else:
            what = f"its envs are lost for {now - loss.since:.0f} s ({loss.error})"
        error = ServerLost(
            f"{address}: {what}, so it is given up; look at the server's log, or raise "
            f"server_lost_after"
        )
        if not self._pads_when_lost or self._state is ClientState.CLOSING:
            self._attachment.lose(error)
            return
        _LOGGER.warning("%s; its rows are padding until it is back", error)
        if is_silent:
            self.begin(error, now)
        if self.loss is not None:
            self.loss.is_hopeless = True

    def attend(self, now: float) -> None:
        """Does what can be done for envs that are away."""
        away, loss = self._attachment.away, self.loss
        if not away:
            return
        away.attend(now, is_granted=self._state is ClientState.READY)
        if loss is not None and loss.is_hopeless:
            address = self._attachment.address
            away.fail_waiting(
                ServerLost(f"{address}: it is given up: {loss.error}"),
            )

    # Recovering.

    def begin(
        self, error: EnvserveError, now: float, *, is_restart: bool = False
    ) -> None:
        """Asks for envs anew, since those that we had are lost.

        Args:
          error: Why they are.
          now: When.
          is_restart: Whether the server cannot know the old lease.
        """
        _LOGGER.warning("%s; asking for envs anew", error)
        before = self.loss
        loss = Loss(error, now if before is None else before.since)
        if before is not None:  # in vain, so far: then not all too often
            loss.is_hopeless = before.is_hopeless
            loss.plan_retry(now)
        if not is_restart:
            loss.farewell = self._sender.encode(MessageType.DETACH)
        self.loss = loss  # from here on an interrupt only delays
        self.complete(now)

    def complete(self, now: float) -> None:
        """Takes back what is in flight, unless it is; harmless when it is repeated."""
        loss, attachment = self.loss, self._attachment
        if loss is None or loss.has_begun:
            return
        if attachment.away is None:
            raise LocalProtocolError("expected envs, since they are lost")
        attachment.away.lose(str(loss.error), loss.error, now)
        self._sender.requests.clear()
        self._sender.change_session()
        attachment.state = ClientState.HELLO_SENT
        if loss.retry_at == math.inf:
            attachment.say_hello(now)
        self._say_farewell(loss)
        loss.has_begun = True
        self.attend(now)

    def go_on(self, now: float) -> None:
        """Asks again when it is time to, or if it was interrupted in that."""
        self.complete(now)
        loss, state = self.loss, self._state
        if loss is None:
            return
        if now < loss.retry_at and not self._is_cut_short(loss):
            return
        loss.retry_at = math.inf
        if state is ClientState.ATTACHING:
            # As the same session: a late copy of what was refused may get the envs.
            self._attachment.ask_for_envs(now)
        elif state is ClientState.HELLO_SENT:
            self._attachment.say_hello(now)
        self._say_farewell(loss)

    def note_granted(self) -> None:
        """Notes that there are envs again, which still have to be reset."""
        if self.loss is not None:
            _LOGGER.info("%s: it has given envs anew", self._attachment.address)
            self.loss.is_hopeless = False

    def refused(self, body: ErrorBody, now: float) -> None:
        """Handles that there are no envs now."""
        loss = self.loss
        if loss is None:
            raise LocalProtocolError("expected to recover")
        is_full = body.code is ErrorCode.ENVS_BUSY and not body.is_draining
        if is_full and loss.is_taken(now):
            error = exception_of(body, self._attachment.address)
            self._attachment.lose(
                LeaseLost(f"{loss.error}; and others have them: {error}")
            )
            return
        self._sender.requests.clear()
        if body.code is not ErrorCode.ENVS_BUSY:  # it remembers how this session ended
            self._sender.change_session()
            self._attachment.state = ClientState.HELLO_SENT
        loss.plan_retry(now)

    def _say_farewell(self, loss: Loss) -> None:
        if loss.farewell is not None:
            self._sender.repeat(loss.farewell)

    @property
    def _state(self) -> ClientState:
        return self._attachment.state
