"""The network between a caller and its host: it loses, copies, delays and resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envserve.wire.message import Buffer
from tests.simulation.clock import VirtualClock
from tests.simulation.hijacker import OWNER
from tests.simulation.host import Host
from tests.simulation.profile import Profile


class Link:
    """A connection, made anew now and then; messages of one before may linger.

    Attributes:
      last_sent: Frames that were sent last.
    """

    def __init__(
        self,
        clock: VirtualClock,
        profile: Profile,
        name: int,
        receive: Callable[[Sequence[Buffer]], None],
    ) -> None:
        """Starts without a connection.

        Args:
          name: Tells clients apart.
        """
        self.is_connected = False
        self.host: Host | None = None
        self.last_sent: Sequence[Buffer] = ()
        self._clock = clock
        self._profile = profile
        self._name = name
        self._receive = receive
        self._generation = 0
        self._cut_until = [0.0, 0.0]  # to the host, and from it

    def connect(self, host: Host) -> None:
        self._generation += 1
        self.host = host
        self.is_connected = True

    def reset(self) -> None:
        """Loses the connection, and what is under way, with some luck not all of it."""
        self._generation += 1
        self.is_connected = False

    def cut(self, seconds: float, *, to_host: bool, from_host: bool) -> None:
        """Cuts one direction, or both, without anybody being told."""
        until = self._clock.now + seconds
        if to_host:
            self._cut_until[0] = until
        if from_host:
            self._cut_until[1] = until

    def calm(self, profile: Profile) -> None:
        """Ends cuts, and gets as good as the profile."""
        self._profile = profile
        self._cut_until = [0.0, 0.0]

    def send(self, frames: Sequence[Buffer]) -> None:
        self.last_sent = frames
        self._send(0, self._arrive_at_host, self.host, self._generation, frames)

    def reply(self, host: Host, generation: int, frames: Sequence[Buffer]) -> None:
        """Sends something from the host, unless that connection is no more."""
        if generation == self._generation or self._profile.is_sticky:
            self._send(1, self._arrive_at_client, host, generation, frames)

    def _send(
        self, direction: int, arrive: Callable[..., None], *arguments: object
    ) -> None:
        clock, profile = self._clock, self._profile
        draw, now = clock.random.random, clock.now
        while draw() >= profile.loss:
            # Most are quick; some are so late that others overtake them by far.
            at = now + profile.max_delay * draw() ** profile.delay_power
            if now < self._cut_until[direction]:
                if draw() < 0.5:
                    return
                at += self._cut_until[direction] - now  # TCP sends it again
            clock.plan(at, arrive, *arguments)
            if draw() >= profile.copies:
                return

    def _arrive_at_host(
        self, host: Host, generation: int, frames: Sequence[Buffer]
    ) -> None:
        if self._profile.is_sticky or generation == self._generation:
            peer = (self._name, generation, OWNER)
            host.do(host.receive, peer, frames)

    def _arrive_at_client(
        self, host: Host, generation: int, frames: Sequence[Buffer]
    ) -> None:
        if self._profile.is_sticky or generation == self._generation:
            self._receive(frames)
