"""How a client turns to another server, when the one that it had is gone.

Its blocks, their rows and what is in flight stay; envs anew cost an episode each. It
goes on under another session number, and nothing of the server before is read again.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from envserve.errors import ServerLost
from envserve.lane import Lane, make_blocks
from envserve.session.client.attachment import Attachment
from envserve.session.client.liveness import LostLease
from envserve.session.states import ClientState
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer

__all__ = ["MovingAttachment"]

_LOGGER: Final = logging.getLogger(__name__)
#: Seconds without a connection after which a server may be gone.
_ALONE: Final = 0.25
#: Those that a server which has lost our envs may take to answer.
_ANSWER: Final = 1.0


class MovingAttachment(Attachment):
    """A claim that can be taken to another server, or wait for a first one."""

    def assume(self, like: Lane, now: float) -> None:
        """Begins as if envs were lost that are such as those of another server."""
        each = sum(block.split == 0 for block in like.blocks)
        blocks = make_blocks(self.attach.num_envs, each, self.attach.num_splits)
        error = ServerLost("no server has come for these rows yet")
        self.operations = self._envs_of(like.spec, blocks)
        self.operations.is_vacant = True
        self.operations.lose(str(error), error)
        self.loss = LostLease(error, now, given_up=error)

    def in_need_since(self, now: float) -> float | None:
        """Returns since when another server might do better; None while ours does."""
        silence, loss = self._requests.liveness, self.loss
        since = min(silence.silent_since, silence.disconnected_since)
        is_alone = now > silence.disconnected_since + _ALONE
        if loss is None or not self.is_recovering:
            is_ready = self.machine.state is ClientState.READY
            return since if is_ready and (is_alone or silence.is_unreachable) else None
        is_refused = self.is_unfit or loss.retry_at < math.inf
        asks_in_vain = is_refused or is_alone or now > silence.silent_since + _ANSWER
        return min(since, loss.since) if asks_in_vain else None

    def move(self, address: str, now: float) -> list[Buffer]:
        """Turns to another server; returns what tells the old one that it is left."""
        _LOGGER.warning("%s: asked for envs in place of %s", address, self.address)
        farewell = self._requests.pack(MessageType.DETACH)
        self._requests.liveness.note_message(
            now
        )  # what counts from now on is the next one's
        self._requests.liveness.note_connected()
        if self.machine.state is ClientState.READY:
            text = f"{self.address}: it is gone, or silent for too long"
            self.lose_lease(ServerLost(text), now)
        assert self.operations is not None
        assert self.loss is not None
        self.loss.retry_at, self.loss.farewell = math.inf, []
        self.address = self.operations.address = address
        self.is_unfit = False
        self._requests.change_session()
        if self.machine.state is not ClientState.CONNECTING:
            self.say_hello(now)
        return farewell
