"""Hosts, clients and trainers, the network between them, and faults; from one seed."""

from __future__ import annotations

import itertools
import math
import random
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest import mock

from envserve.client import batch_env, lane_group
from envserve.lane import mark_harmless
from envserve.session.server.decisions import Reply
from tests.oracle.ledger import Ledger
from tests.simulation.clock import VirtualClock
from tests.simulation.endpoint import Endpoint
from tests.simulation.faults import strike
from tests.simulation.host import Host
from tests.simulation.journal import SimulationJournal, Violation
from tests.simulation.profile import Profile
from tests.simulation.random_client import RandomClient
from tests.simulation.trainer import Trainer

#: Events between two looks at what must hold at any time.
_EVENTS_PER_CHECK: Final = 64
#: Once nothing fails any more, everything has to end within this.
_CALM_SECONDS: Final = 1000.0
_CALM_EVENTS: Final = 50_000


class Simulation:
    """One simulation.

    Attributes:
      numbers: Numbers that nobody else has.
      endpoints: Clients, by number.
      clients: Who uses sessions.
      trainers: Who uses batches.
      calm_at: From which event on nothing fails any more.
      interrupt_in: Events until Ctrl-C, if not None.
    """

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        """Starts; by default the profile is drawn as well."""
        source = random.Random(seed)
        self.profile = Profile.draw(source) if profile is None else profile
        self.clock = VirtualClock(source)
        self.journal = SimulationJournal()
        self.numbers = itertools.count(1)
        self.endpoints: dict[int, Endpoint] = {}
        self.calm_at = math.inf
        self.interrupt_in: int | None = None
        self._is_calm = False
        self._give_up_at = (math.inf, math.inf)
        profile = self.profile
        self.hosts = [Host(self) for _ in range(profile.num_hosts)]
        self.clients = [RandomClient(self) for _ in range(profile.num_clients)]
        self.trainers = [Trainer(self) for _ in range(profile.num_trainers)]

    def enter(self, endpoint: Endpoint) -> int:
        number = next(self.numbers)
        self.endpoints[number] = endpoint
        return number

    def leave(self, endpoint: Endpoint) -> None:
        del self.endpoints[endpoint.number]

    def deliver(self, host: Host, reply: Reply) -> None:
        """Sends a reply on its way; drops it if who asked is no more."""
        number, generation, _ = reply.peer
        endpoint = self.endpoints.get(number)
        if endpoint is not None:
            endpoint.link.reply(host, generation, reply.frames)

    # How it goes on.

    def step(self, until: float = math.inf) -> None:
        """Lets the next event happen, and maybe a fault; or time pass until then."""
        clock = self.clock
        if clock.next_at > until:
            clock.now = max(clock.now, until)
            return
        clock.step()
        if clock.random.random() < self.profile.fault_rate:
            faults = self.profile.faults
            kinds, weights = list(faults), list(faults.values())
            strike(self, clock.random.choices(kinds, weights)[0])
        if clock.num_events % _EVENTS_PER_CHECK == 0:
            self.check()
        if clock.num_events >= self.calm_at and not self._is_calm:
            self._calm()
        seconds, events = self._give_up_at
        if clock.now > seconds or clock.num_events > events:
            raise Violation("clients and hosts do not come to rest")
        if self.interrupt_in is not None:
            self.interrupt_in -= 1
            if self.interrupt_in <= 0:
                self.interrupt_in = None
                interrupt = KeyboardInterrupt()
                if clock.random.random() < 0.7:  # else it cuts bookkeeping short
                    mark_harmless(interrupt)
                raise interrupt

    def run(self, num_events: int) -> None:
        last = self.clock.num_events + num_events
        while self.clock.num_events < last:
            for trainer in self.trainers:
                trainer.go_on()
            if not self.trainers:
                self.step()

    def check(self) -> None:
        for host in self.hosts:
            host.check_bounds()

    def _calm(self) -> None:
        clock = self.clock
        self._is_calm = True
        self._give_up_at = clock.now + _CALM_SECONDS, clock.num_events + _CALM_EVENTS
        clock.note("calm")
        self.profile = self.profile.calmed()
        for host in self.hosts:
            host.has_defect = False
            host.wake()
            host.start()
        for endpoint in list(self.endpoints.values()):
            endpoint.calm(self.profile)

    def finish(self) -> None:
        """Lets nothing fail any more; then everything has to work, and to end."""
        if not self._is_calm:
            self._calm()
        for trainer in self.trainers:
            trainer.finish()
        while self.clock.has_events and self.clock.now < self._give_up_at[0]:
            self.step()
        for caller in self.clients:
            caller.check_ended()
        for host in self.hosts:
            host.check_free()
        self.journal.audit(self.ledgers)

    @property
    def ledgers(self) -> list[Ledger]:
        users: list[RandomClient | Trainer] = [*self.clients, *self.trainers]
        return [ledger for user in users for ledger in user.ledgers]

    @contextmanager
    def as_time(self) -> Iterator[None]:
        """Has batches know no other time than this simulation's."""

        def read() -> float:
            return self.clock.now

        time = types.SimpleNamespace(monotonic=read, perf_counter=read)
        with ExitStack() as stack:
            for module in (batch_env, lane_group):
                stack.enter_context(mock.patch.object(module, "time", time))
            yield


def simulate(seed: int, num_events: int, profile: Profile | None = None) -> Simulation:
    """Runs a simulation to its end.

    Args:
      num_events: How many events there are before everything is made to end.

    Raises:
      Violation: Something has happened that must not; or our own code has failed.
    """
    simulation = Simulation(seed, profile)
    profile = simulation.profile
    try:
        with simulation.as_time():
            simulation.calm_at = num_events
            simulation.run(num_events)
            simulation.finish()
    except Exception as error:
        raise Violation(
            f"seed {seed}, event {simulation.clock.num_events}: {error!r}\n"
            f"{profile}\n{simulation.clock.trace}"
        ) from error
    return simulation
