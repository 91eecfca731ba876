"""The network between a client and its host: drops, copies, delays and resets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envserve.wire.message import Buffer
from tests.simulation.clock import VirtualClock
from tests.simulation.hijacker import OWNER
from tests.simulation.host import Host
from tests.simulation.profile import Profile


class Link:
    """A connection that may be reset, and whose messages may arrive after the reset.

    Attributes:
      last_sent: Frames of the last message that the client sent.
    """

    def __init__(
        self,
        clock: VirtualClock,
        profile: Profile,
        name: int,
        receive: Callable[[Sequence[Buffer]], None],
    ) -> None:
        """Create a link that is not connected.

        Args:
          name: Unique number of the client.
        """
        self.is_connected = False
        self.host: Host | None = None
        self.last_sent: Sequence[Buffer] = ()
        self._clock = clock
        self._profile = profile
        self._name = name
        self._receive = receive
        self._generation = 0
        self._cut_until = [0.0, 0.0]  # end of the cut to the host, and from the host

    def connect(self, host: Host) -> None:
        self._generation += 1
        self.host = host
        self.is_connected = True

    def reset(self) -> None:
        """Drop the connection, and its messages unless the profile is sticky."""
        self._generation += 1
        self.is_connected = False

    def cut(self, seconds: float, *, to_host: bool, from_host: bool) -> None:
        """Silently drop or delay all messages in one or both directions."""
        until = self._clock.now + seconds
        if to_host:
            self._cut_until[0] = until
        if from_host:
            self._cut_until[1] = until

    def stop_faults(self, profile: Profile) -> None:
        """End cuts and use a profile without faults."""
        self._profile = profile
        self._cut_until = [0.0, 0.0]

    def send(self, frames: Sequence[Buffer]) -> None:
        self.last_sent = frames
        self._send(0, self._arrive_at_host, self.host, self._generation, frames)

    def reply(self, host: Host, generation: int, frames: Sequence[Buffer]) -> None:
        """Send frames from the host, unless their connection has been replaced.

        With a sticky profile, they are sent in any case.
        """
        if generation == self._generation or self._profile.is_sticky:
            self._send(1, self._arrive_at_client, host, generation, frames)

    def _send(
        self, direction: int, arrive: Callable[..., None], *arguments: object
    ) -> None:
        clock, profile = self._clock, self._profile
        draw, now = clock.random.random, clock.now
        while draw() >= profile.loss:
            # Most messages are fast; many overtake the few that are very late.
            at = now + profile.max_delay * draw() ** profile.delay_power
            if now < self._cut_until[direction]:
                if draw() < 0.5:
                    return
                at += self._cut_until[direction] - now  # as if TCP retransmitted it
            clock.schedule(at, arrive, *arguments)
            if draw() >= profile.copies:
                return

    def _arrive_at_host(
        self, host: Host, generation: int, frames: Sequence[Buffer]
    ) -> None:
        if self._profile.is_sticky or generation == self._generation:
            peer = (self._name, generation, OWNER)
            host.run_when_awake(host.receive, peer, frames)

    def _arrive_at_client(
        self, host: Host, generation: int, frames: Sequence[Buffer]
    ) -> None:
        if self._profile.is_sticky or generation == self._generation:
            self._receive(frames)
