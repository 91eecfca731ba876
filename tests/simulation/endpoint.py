"""A client session with its simulated connection and timer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.wire.bodies import Attach
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer
from tests.simulation.clock import PausableProcess
from tests.simulation.host import Host
from tests.simulation.journal import Violation
from tests.simulation.link import Link
from tests.simulation.profile import Profile

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_CONNECT_SECONDS: Final = 10.0
_LOST_SECONDS: Final = 60.0
#: The interval of pings; silence is detected only after the next ping.
_PING_SECONDS: Final = 1.0
#: Seconds after which a session without envs tries another host.
_SEARCH_SECONDS: Final = 10.0
_MARGIN_SECONDS: Final = 1e-6


class Endpoint(PausableProcess):
    """Runs one client session after another, each with one of the hosts.

    Attributes:
      number: Unique number of this endpoint.
      session: The client session; None between two sessions.
      never_gives_up: Whether the session waits for the server without a time limit.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.clock)
        self.simulation = simulation
        self.number = simulation.register(self)
        self.session: ClientSession | None = None
        self.link = Link(
            simulation.clock, simulation.profile, self.number, self._arrive
        )
        self.num_envs = 0
        self.never_gives_up = False
        self._wake_at = math.inf
        self._last_received_at = 0.0

    def schedule(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        """Schedule an event of this endpoint; it waits while the endpoint is paused."""
        self.clock.schedule(self.clock.now + seconds, self.run_when_awake, event, *args)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}>"

    # Hooks for subclasses.

    def _after_event(self, session: ClientSession) -> None:
        """Run after every event of the session."""

    def _on_move(self) -> None:
        """Run when the session abandons its envs for those of another host."""

    def stop_faults(self, profile: Profile) -> None:
        """Stop all faults of this endpoint."""
        self.link.stop_faults(profile)
        self.wake()
        self._find_envs()

    def _find_envs(self) -> None:
        """Try the hosts in turn, as a client does, until one of them has free envs.

        Otherwise, a session that was moved to a full host would wait for ever.
        """
        if self.session is None or not self.session.attachment.is_recovering:
            return
        hosts = self.simulation.hosts
        if self.link.host is not None:
            self.move(hosts[(hosts.index(self.link.host) + 1) % len(hosts)])
        self.schedule(_SEARCH_SECONDS, self._find_envs)

    # Sessions.

    def attach(self, host: Host, attach: Attach) -> None:
        source, now = self.clock.random, self.clock.now
        self.never_gives_up = source.random() < 0.2
        self.session = ClientSession(
            "tcp://host",
            attach,
            Timeouts(
                connect_seconds=_CONNECT_SECONDS,
                lost_seconds=_LOST_SECONDS,
                operation_seconds=self.simulation.profile.operation_seconds,
                pads_lost_rows=self.never_gives_up,
            ),
            session=source.getrandbits(63) + 1,
            now=now,
        )
        self.num_envs = attach.num_envs
        self._last_received_at = now
        self._wake_at = math.inf
        if not self.link.is_connected or self.link.host is not host:
            self.link.is_connected = False
            self.schedule(0.01, self._connect, self.session, host)
        else:
            self.session.record_connect(now)
        self.update()

    def _connect(self, session: ClientSession, host: Host) -> None:
        if session is self.session and not self.link.is_connected:
            self.link.connect(host)
            session.record_connect(self.clock.now)
            self.update()

    def disconnect(self, seconds: float) -> None:
        if self.session is not None and self.link.host and self.link.is_connected:
            self.link.reset()
            self.session.record_disconnect(self.clock.now)
            self.schedule(seconds, self._connect, self.session, self.link.host)

    def move(self, host: Host) -> None:
        """Move the session to another host, if its state allows that."""
        session, now = self.session, self.clock.now
        if session is None or host is self.link.host:
            return
        attachment = session.attachment
        if session.state is ClientState.READY or attachment.is_recovering:
            detach = session.requests.pack(MessageType.DETACH)
            attachment.move_to(f"tcp://host-{self.simulation.hosts.index(host)}", now)
            if self.link.is_connected:
                self.link.send(detach)
            self.link.reset()
            session.record_disconnect(now)
            self.schedule(0.01, self._connect, session, host)
            self._on_move()
            self.update()

    # Events of the session.

    def _arrive(self, frames: Sequence[Buffer]) -> None:
        self.run_when_awake(self._receive, frames)

    def _receive(self, frames: Sequence[Buffer]) -> None:
        if self.session is not None:
            self._last_received_at = self.clock.now
            self.session.receive(frames, self.clock.now)
            self.update()

    def _wake(self, session: ClientSession, at: float) -> None:
        if (
            session is self.session and at == self._wake_at
        ):  # otherwise, a newer timer exists
            self._wake_at = math.inf
            session.advance(self.clock.now)
            self._check_silence(session)
            self.update()

    def update(self) -> None:
        """Send queued messages and schedule the next deadline."""
        session = self.session
        if session is None:
            return
        outbox = session.outbox
        if self.link.is_connected:
            for key in list(outbox):
                self.link.send(outbox.pop(key))
        elif len(outbox) > 2 * self.num_envs + 2:
            most = 2 * self.num_envs + 2
            raise Violation(
                f"expected at most {most} queued messages; got {len(outbox)}"
            )
        self._check_stalls(session)
        self._after_event(session)
        if session is not self.session or session.state.is_over:
            return
        deadline = session.next_deadline()
        if deadline < self._wake_at:
            self._wake_at = deadline
            self.clock.schedule(
                deadline, self.run_when_awake, self._wake, session, deadline
            )

    def _check_stalls(self, session: ClientSession) -> None:
        """Fail if a client lost a server that replies to PING and may not stall."""
        loss = session.attachment.lost_lease
        reason = str(session.error or (loss and loss.error))
        if "the server replies, but ignores" not in reason:
            return
        self.simulation.stalls.add(reason)
        if not self.simulation.may_stall:
            raise Violation(f"a client treated a correct server as lost: {reason}")

    def _check_silence(self, session: ClientSession) -> None:
        silence = self.clock.now - self._last_received_at
        limit = _LOST_SECONDS + _PING_SECONDS + _MARGIN_SECONDS
        if silence > limit and not session.state.is_over and not self.never_gives_up:
            raise Violation(f"{session!r} still waits after {silence:.1f} s of silence")

    def wake(self) -> None:
        """Resume after a pause, which does not count as a silence of the server."""
        self._last_received_at = self.clock.now
        super().wake()
