"""A simulation of hosts, clients and trainers with network faults, from one seed."""

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
from tests.simulation.faults import inject_fault
from tests.simulation.host import Host
from tests.simulation.journal import SimulationJournal, Violation
from tests.simulation.profile import Profile
from tests.simulation.random_client import RandomClient
from tests.simulation.trainer import Trainer

#: Number of events between two checks of the invariants.
_EVENTS_PER_CHECK: Final = 64
#: Maximum virtual seconds and number of events until all clients finish, once faults
#: have stopped.
_DRAIN_SECONDS: Final = 1000.0
_DRAIN_EVENTS: Final = 50_000
#: With a higher probability of lost messages, a server may seem to ignore a request:
#: the network may lose all copies of the request or of its reply for a minute, but
#: deliver PONGs.
_MAX_LOSS: Final = 0.05


class Simulation:
    """One simulation in virtual time.

    Attributes:
      unique_numbers: Generator of unique integers.
      endpoints: Client endpoints by number.
      may_stall: Whether a server that replies to PING may seem to ignore a request.
      stalls: Errors of clients that treated a server as lost although it replies to
        PING.
      clients: Clients that use sessions directly.
      trainers: Trainers that use batches.
      faults_end_at: Number of events after which no more faults happen.
      interrupt_in: Number of events until a KeyboardInterrupt, or None.
    """

    def __init__(self, seed: int, profile: Profile | None = None) -> None:
        """Start the simulation; by default, the profile is also drawn from the seed."""
        source = random.Random(seed)
        self.profile = Profile.draw(source) if profile is None else profile
        self.clock = VirtualClock(source)
        self.journal = SimulationJournal()
        self.unique_numbers = itertools.count(1)
        self.endpoints: dict[int, Endpoint] = {}
        self.stalls: set[str] = set()
        self.may_stall = (
            "mute_host" in self.profile.faults or self.profile.loss > _MAX_LOSS
        )
        self.faults_end_at = math.inf
        self.interrupt_in: int | None = None
        self._has_stopped_faults = False
        self._give_up_at = (math.inf, math.inf)
        profile = self.profile
        self.hosts = [Host(self) for _ in range(profile.num_hosts)]
        self.clients = [RandomClient(self) for _ in range(profile.num_clients)]
        self.trainers = [Trainer(self) for _ in range(profile.num_trainers)]

    def register(self, endpoint: Endpoint) -> int:
        number = next(self.unique_numbers)
        self.endpoints[number] = endpoint
        return number

    def unregister(self, endpoint: Endpoint) -> None:
        del self.endpoints[endpoint.number]

    def deliver(self, host: Host, reply: Reply) -> None:
        """Send a reply over its client's link; drop it if the client is gone."""
        number, generation, _ = reply.peer
        endpoint = self.endpoints.get(number)
        if endpoint is not None:
            endpoint.link.reply(host, generation, reply.frames)

    # Progress.

    def step(self, until: float = math.inf) -> None:
        """Run the next event and possibly a fault, or advance time to `until`."""
        clock = self.clock
        if clock.next_at > until:
            clock.now = max(clock.now, until)
            return
        clock.step()
        if clock.random.random() < self.profile.fault_rate:
            faults = self.profile.faults
            kinds, weights = list(faults), list(faults.values())
            inject_fault(self, clock.random.choices(kinds, weights)[0])
        if clock.num_events % _EVENTS_PER_CHECK == 0:
            self.check()
        if clock.num_events >= self.faults_end_at and not self._has_stopped_faults:
            self._stop_faults()
        seconds, events = self._give_up_at
        if clock.now > seconds or clock.num_events > events:
            raise Violation("clients did not finish in time after faults had stopped")
        if self.interrupt_in is not None:
            self.interrupt_in -= 1
            if self.interrupt_in <= 0:
                self.interrupt_in = None
                interrupt = KeyboardInterrupt()
                # An interrupt that is not marked may have hit the batch's bookkeeping.
                if clock.random.random() < 0.7:
                    mark_harmless(interrupt)
                raise interrupt

    def run(self, num_events: int) -> None:
        last = self.clock.num_events + num_events
        while self.clock.num_events < last:
            for trainer in self.trainers:
                trainer.run_once()
            if not self.trainers:
                self.step()

    def check(self) -> None:
        for host in self.hosts:
            host.check_bounds()

    def _stop_faults(self) -> None:
        clock = self.clock
        self._has_stopped_faults = True
        self._give_up_at = clock.now + _DRAIN_SECONDS, clock.num_events + _DRAIN_EVENTS
        clock.record("faults end")
        self.profile = self.profile.without_faults()
        for host in self.hosts:
            host.fails_next_message = False
            host.wake()
            host.start()
            host.recover()
        for endpoint in list(self.endpoints.values()):
            endpoint.stop_faults(self.profile)

    def finish(self) -> None:
        """Stop all faults, and verify that every client can then step and close."""
        if not self._has_stopped_faults:
            self._stop_faults()
        trainers = self.trainers
        while trainers:  # in turns, because a trainer may wait for another one's envs
            trainers = [each for each in trainers if not each.try_to_finish()]
        while self.clock.has_events and self.clock.now < self._give_up_at[0]:
            self.step()
        for client in self.clients:
            client.check_ended()
        for host in self.hosts:
            host.check_all_free()
        self.journal.audit(self.ledgers)

    @property
    def ledgers(self) -> list[Ledger]:
        users: list[RandomClient | Trainer] = [*self.clients, *self.trainers]
        return [ledger for user in users for ledger in user.ledgers]

    @contextmanager
    def patched_time(self) -> Iterator[None]:
        """Make batches use the virtual clock."""

        def read() -> float:
            return self.clock.now

        time = types.SimpleNamespace(monotonic=read, perf_counter=read)
        with ExitStack() as stack:
            for module in (batch_env, lane_group):
                stack.enter_context(mock.patch.object(module, "time", time))
            yield


def simulate(seed: int, num_events: int, profile: Profile | None = None) -> Simulation:
    """Run a simulation to its end.

    Args:
      num_events: Number of events before faults stop and clients close.

    Raises:
      Violation: An invariant was violated, or the code under test raised.
    """
    simulation = Simulation(seed, profile)
    profile = simulation.profile
    try:
        with simulation.patched_time():
            simulation.faults_end_at = num_events
            simulation.run(num_events)
            simulation.finish()
    except Exception as error:
        raise Violation(
            f"seed {seed}, event {simulation.clock.num_events}: {error!r}\n"
            f"{profile}\n{simulation.clock.trace}"
        ) from error
    return simulation
