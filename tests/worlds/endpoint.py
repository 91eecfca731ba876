"""A client's half of the conversation, with its connection and its time.

What is done with its envs is a subclass's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.wire.bodies import Attach
from envserve.wire.message import Buffer
from tests.worlds.clock import Patient
from tests.worlds.host import Host
from tests.worlds.journal import Violation
from tests.worlds.link import Link
from tests.worlds.profile import Profile

if TYPE_CHECKING:
    from tests.worlds.world import World

_CONNECT_SECONDS: Final = 10.0
_LOST_SECONDS: Final = 60.0
#: A ping is sent only so often, and a silence is noticed only after it.
_PING_SECONDS: Final = 1.0
_MARGIN_SECONDS: Final = 1e-6


class Endpoint(Patient):
    """Has one session after the other, each with some host.

    Attributes:
      number: Tells it from others.
      session: The client's half; None between two sessions.
      is_tenacious: Whether its session never gives up.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.clock)
        self.world = world
        self.number = world.enter(self)
        self.session: ClientSession | None = None
        self.link = Link(world.clock, world.profile, self.number, self._arrive)
        self.num_envs = 0
        self.is_tenacious = False
        self._wake_at = math.inf
        self._heard_at = 0.0

    def plan(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        """Plans an event that happens to it, once it is awake."""
        self.clock.plan(self.clock.now + seconds, self.do, event, *args)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}>"

    # What a subclass says.

    def _look_after(self, session: ClientSession) -> None:
        """Does what is to be done after anything has happened."""

    def _note_move(self) -> None:
        """Notes that its envs are given up for others."""

    def calm(self, profile: Profile) -> None:
        """Nothing fails any more."""
        self.link.calm(profile)
        self.wake()

    # Sessions.

    def attach(self, host: Host, attach: Attach) -> None:
        source, now = self.clock.random, self.clock.now
        self.is_tenacious = source.random() < 0.2
        self.session = ClientSession(
            "tcp://host",
            attach,
            Timeouts(
                connect_seconds=_CONNECT_SECONDS,
                lost_seconds=_LOST_SECONDS,
                pads_lost_rows=self.is_tenacious,
            ),
            session=source.getrandbits(63) + 1,
            now=now,
        )
        self.num_envs = attach.num_envs
        self._heard_at = now
        self._wake_at = math.inf
        if not self.link.is_connected or self.link.host is not host:
            self.link.is_connected = False
            self.plan(0.01, self._connect, self.session, host)
        else:
            self.session.record_connect(now)
        self.look()

    def _connect(self, session: ClientSession, host: Host) -> None:
        if session is self.session and not self.link.is_connected:
            self.link.connect(host)
            session.record_connect(self.clock.now)
            self.look()

    def lose_link(self, seconds: float) -> None:
        if self.session is not None and self.link.host and self.link.is_connected:
            self.link.reset()
            self.session.record_disconnect(self.clock.now)
            self.plan(seconds, self._connect, self.session, self.link.host)

    def move(self, host: Host) -> None:
        """Turns to another host, if it can, whatever the one before may send yet."""
        session, now = self.session, self.clock.now
        if session is None or host is self.link.host:
            return
        attachment = session.attachment
        if session.state is ClientState.READY or attachment.is_recovering:
            farewell = attachment.move_to(
                f"tcp://host-{self.world.hosts.index(host)}", now
            )
            if self.link.is_connected:
                self.link.send(farewell)
            self.link.reset()
            session.record_disconnect(now)
            self.plan(0.01, self._connect, session, host)
            self._note_move()
            self.look()

    # What happens to the session.

    def _arrive(self, frames: Sequence[Buffer]) -> None:
        self.do(self._receive, frames)

    def _receive(self, frames: Sequence[Buffer]) -> None:
        if self.session is not None:
            self._heard_at = self.clock.now
            self.session.receive(frames, self.clock.now)
            self.look()

    def _wake(self, session: ClientSession, at: float) -> None:
        if session is self.session and at == self._wake_at:  # else there is a later one
            self._wake_at = math.inf
            session.advance(self.clock.now)
            self._check_silence(session)
            self.look()

    def look(self) -> None:
        """Sends, and plans what is next."""
        session = self.session
        if session is None:
            return
        outbox = session.outbox
        if self.link.is_connected:
            for key in list(outbox):
                self.link.send(outbox.pop(key))
        elif len(outbox) > 2 * self.num_envs + 2:
            raise Violation(f"{len(outbox)} messages wait to be sent")
        self._look_after(session)
        if session is not self.session or session.state.is_over:
            return
        deadline = session.next_deadline()
        if deadline < self._wake_at:
            self._wake_at = deadline
            self.clock.plan(deadline, self.do, self._wake, session, deadline)

    def _check_silence(self, session: ClientSession) -> None:
        silence = self.clock.now - self._heard_at
        limit = _LOST_SECONDS + _PING_SECONDS + _MARGIN_SECONDS
        if silence > limit and not session.state.is_over and not self.is_tenacious:
            raise Violation(f"{session!r} waits, after a silence of {silence:.1f} s")

    def wake(self) -> None:
        """Goes on after a pause; what was silent meanwhile was itself."""
        self._heard_at = self.clock.now
        super().wake()
