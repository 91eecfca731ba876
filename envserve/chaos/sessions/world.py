"""Hosts and callers, the network between them, and faults; all from one seed."""

from __future__ import annotations

import itertools
import random
from typing import Final

from envserve.chaos.sessions.caller import Caller
from envserve.chaos.sessions.clock import Clock
from envserve.chaos.sessions.faults import strike
from envserve.chaos.sessions.host import Host
from envserve.chaos.sessions.ledger import Ledger, Violation
from envserve.chaos.sessions.profile import Profile
from envserve.session import Reply

__all__ = ["World", "simulate"]

#: Events between two looks at what must hold at any time.
_EVENTS_PER_CHECK: Final = 64
#: Once nothing fails any more, everything has to end within this.
_CALM_SECONDS: Final = 1000.0
_CALM_EVENTS: Final = 50_000


class World:
    """One simulation.

    Attributes:
      profile: What it is like.
      clock: Its time and its events.
      ledger: The oracle.
      hosts: Where servers run.
      callers: Who uses them.
    """

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        """Starts; by default the profile is drawn as well."""
        source = random.Random(seed)
        self.profile = Profile.draw(source) if profile is None else profile
        self.clock = Clock(source)
        self.ledger = Ledger()
        numbers = itertools.count(1)
        self.hosts = [
            Host(self.clock, self.profile, self.ledger, numbers, self._deliver)
            for _ in range(self.profile.num_hosts)
        ]
        self.callers = [
            Caller(self.clock, self.profile, self.ledger, numbers, self.hosts, index)
            for index in range(self.profile.num_callers)
        ]

    def _deliver(self, host: Host, reply: Reply) -> None:
        caller = self.callers[int(reply.route.partition(b".")[0])]
        caller.link.reply(host, reply.route, reply.frames)

    def run(self, num_events: int) -> None:
        """Lets so many events happen, with faults between them."""
        clock, rate = self.clock, self.profile.fault_rate
        kinds, weights = list(self.profile.faults), list(self.profile.faults.values())
        draw = clock.random.random
        last = clock.num_events + num_events
        while clock.num_events < last:
            clock.step()
            if draw() < rate:
                strike(self, clock.random.choices(kinds, weights)[0])
            if clock.num_events % _EVENTS_PER_CHECK == 0:
                self.check()

    def check(self) -> None:
        """Checks what must hold at any time."""
        for host in self.hosts:
            host.check_bounds()

    def finish(self) -> None:
        """Lets nothing fail any more; then everything has to work, and to end."""
        clock = self.clock
        clock.note("calm")
        profile = self.profile.calmed()
        for host in self.hosts:
            host.profile = profile
            host.has_defect = False
            host.wake()
            host.start()
        for caller in self.callers:
            caller.calm(profile)
        give_up_at = clock.now + _CALM_SECONDS
        last = clock.num_events + _CALM_EVENTS
        while clock.now < give_up_at and clock.has_events:
            clock.step()
            if clock.num_events > last:
                raise Violation("callers and hosts do not come to rest")
        for caller in self.callers:
            caller.check_ended()
        for host in self.hosts:
            host.check_free()


def simulate(seed: int, num_events: int, profile: Profile | None = None) -> World:
    """Runs a simulation to its end.

    Args:
      seed: What everything follows from.
      num_events: How many events there are before everything is made to end.
      profile: What it is like; drawn by default.

    Raises:
      Violation: Something has happened that must not; or our own code has failed.
    """
    world = World(seed, profile)
    try:
        world.run(num_events)
        world.finish()
    except Exception as error:
        raise Violation(
            f"seed {seed}, event {world.clock.num_events}: {error!r}\n"
            f"{world.profile}\n{world.clock.trace}"
        ) from error
    return world
