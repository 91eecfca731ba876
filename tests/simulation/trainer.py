"""A trainer that runs random operations on a batch over simulated sessions.

It verifies every result. While one of its calls blocks, the simulation continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from envserve.client import BatchEnv, StepResult
from envserve.client.row_set import BatchBlocks
from envserve.errors import CallError, EnvserveError, EnvTimeout, ProtocolError
from envserve.wire.bodies import Attach, pack_options
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger
from tests.simulation.host import Host
from tests.simulation.journal import Violation, check_levels
from tests.simulation.pool import LENGTH, SPEC
from tests.simulation.profile import log_uniform
from tests.simulation.simulated_lane import SimulatedLane

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_START_SECONDS: Final = 100.0
#: Values of `padding_after` in seconds.
_PADDING_AFTER: Final = (0.0, 0.1, 2.0, math.inf)


class SimulatedDriver(BatchDriver):
    """Drives a batch of simulated lanes, which skip resets if they have given up."""

    def check_reset(
        self,
        observation: Array,
        rows: Array | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        rows = np.arange(self.batch.num_envs) if rows is None else rows
        is_reset = self.were_reset(rows)
        self.ledger.skip_reset(observation[~is_reset], rows[~is_reset])
        if seeds is not None:
            seeds = [seeds[index] for index in np.flatnonzero(is_reset).tolist()]
        self.ledger.reset(observation[is_reset], rows[is_reset], seeds)

    def were_reset(self, rows: Array) -> Array:
        """Return a mask of the rows that the last reset has not skipped."""
        all_blocks = BatchBlocks.of(self.batch.lanes)
        blocks = [all_blocks.block_of(row) for row in rows.tolist()]
        lanes = [cast(SimulatedLane, block.lane) for block in blocks]
        return np.array(
            [
                block.lane_block in lane.reset_blocks or not lane.has_given_up
                for block, lane in zip(blocks, lanes, strict=True)
            ]
        )


class Trainer:
    """Uses one batch after another.

    Attributes:
      driver: Steps and verifies the current batch; None between two batches.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.ledgers: list[Ledger] = []
        self.driver: SimulatedDriver | None = None
        self._random = simulation.clock.random

    # Batches.

    def run_once(self) -> None:
        try:
            if self.driver is None:
                self._connect_to_random_hosts()
            else:
                self._run_random_operation(self.driver)
        except EnvserveError as error:
            if isinstance(error, ProtocolError):
                raise
            self.close()
            self.wait(log_uniform(self._random, 0.1, 2.0))

    def _connect_to_random_hosts(self) -> None:
        source, simulation = self._random, self.simulation
        uses_all_hosts = source.random() < 0.7
        hosts = source.sample(
            simulation.hosts, len(simulation.hosts) if uses_all_hosts else 1
        )
        max_envs = min(4, simulation.profile.total_envs)
        sizes = [source.randint(1, max_envs) for _ in hosts]
        self.connect(hosts, sizes, source.randint(1, 2), source.choice(_PADDING_AFTER))

    def connect(
        self,
        hosts: Sequence[Host],
        sizes: Sequence[int],
        num_splits: int,
        padding_after: float,
    ) -> None:
        """Create a batch with envs on each host, and reset it."""
        simulation, seed = self.simulation, next(self.simulation.unique_numbers)
        lanes: list[SimulatedLane] = []
        try:
            first = 0
            for host, num_envs in zip(hosts, sizes, strict=True):
                attach = Attach(
                    env_name=SPEC.env_name,
                    num_envs=num_envs,
                    num_splits=num_splits,
                    seed=seed,
                    first_env_index=first,
                )
                lanes.append(SimulatedLane(simulation, host, attach))
                first += num_envs
            for lane in lanes:
                lane.finish_start(simulation.clock.now + _START_SECONDS)
        except EnvserveError:
            for lane in lanes:
                lane.close()
            raise
        batch = BatchEnv(lanes, padding_after=padding_after)
        ledger = Ledger(first, seed, length=LENGTH, clock=lambda: simulation.clock.now)
        self.ledgers.append(ledger)
        generator = np.random.default_rng(seed)
        try:
            self.driver = SimulatedDriver(batch, ledger, generator, math.inf)
        except EnvserveError:
            batch.close()
            raise

    def close(self) -> None:
        if self.driver is not None:
            self.driver.batch.close()
            self.driver = None

    def wait(self, seconds: float) -> None:
        until = self.simulation.clock.now + seconds
        while self.simulation.clock.now < until:
            self.simulation.step(until)

    def try_to_finish(self) -> bool:
        """Step once; close and return True if all rows are valid."""
        if self.driver is None:
            self.run_once()
        elif self._are_all_valid(self.driver):
            self.close()
            return True
        return False

    def _are_all_valid(self, driver: SimulatedDriver) -> bool:
        try:
            return bool(self.step(driver).valid.all())
        except EnvserveError:
            self.close()
            return False

    # Operations.

    def _run_random_operation(self, driver: SimulatedDriver) -> None:
        operations: list[Callable[[SimulatedDriver], Any]]
        operations = [self.step, self._send_and_receive, self._reset, self._interrupt]
        operations.append(self._call)
        (operation,) = self._random.choices(operations, [0.5, 0.3, 0.08, 0.08, 0.04])
        operation(driver)

    def step(self, driver: SimulatedDriver) -> StepResult:
        try:
            return driver.step()
        except BaseException:
            driver.ledger.mark_unanswered(driver.actions)
            raise

    def _send_and_receive(self, driver: SimulatedDriver) -> None:
        """Send blocks in random order, and receive them as they finish."""
        batch, source = driver.batch, self._random
        in_flight: set[int] = set()
        num_sends = source.randint(1, 4)
        try:
            while num_sends or in_flight:
                idle = [b for b in batch.blocks if in_flight.isdisjoint(b.tolist())]
                if num_sends and idle and (not in_flight or source.random() < 0.5):
                    num_sends -= 1
                    chosen = source.sample(idle, source.randint(1, len(idle)))
                    rows = driver.random.permutation(np.concatenate(chosen))
                    in_flight.update(rows.tolist())
                    driver.send(rows, together=source.random() < 0.5)
                else:
                    in_flight.difference_update(self._receive(driver, len(in_flight)))
        except EnvserveError:
            left = np.array(sorted(in_flight), np.int64)
            driver.ledger.mark_unanswered(driver.actions[left], left)
            raise

    def _receive(self, driver: BatchDriver, num_in_flight: int) -> list[int]:
        """Receive some of the rows in flight; may time out or be interrupted."""
        source = self._random
        self._schedule_interrupt(0.02)
        timeout = source.choice((None, None, None, 0.0, 1.0, 10.0))
        try:
            rows, _ = driver.receive(timeout, source.randint(1, num_in_flight))
        except (EnvTimeout, KeyboardInterrupt):
            return []
        finally:
            self.simulation.interrupt_in = None
        return rows.tolist()

    def _reset(self, driver: SimulatedDriver) -> None:
        rows = np.flatnonzero(driver.random.random(driver.batch.num_envs) < 0.3)
        source, options, seeds = self._random, None, None
        if source.random() < 0.5:
            options = {"level": self.simulation.journal.new_level()}
        if source.random() < 0.5:
            seeds = [source.choice((None, source.getrandbits(62))) for _ in rows]
        if len(rows):
            for lane in driver.batch.lanes:
                cast(SimulatedLane, lane).watch_reset()
            observation = driver.batch.reset(rows, seeds, options=options)
            driver.check_reset(observation, rows, seeds)
            reset_rows = rows[driver.were_reset(rows)].tolist()
            encoded = pack_options(options)
            check_levels(driver.batch.reset_infos, reset_rows, encoded)

    def _interrupt(self, driver: SimulatedDriver) -> None:
        """Interrupt a step."""
        self._schedule_interrupt(1.0)
        try:
            self.step(driver)
        except KeyboardInterrupt:
            pass
        finally:
            self.simulation.interrupt_in = None

    def _schedule_interrupt(self, probability: float) -> None:
        if self._random.random() < probability:
            self.simulation.interrupt_in = self._random.randint(1, 40)

    def _call(self, driver: SimulatedDriver) -> None:
        argument = self.simulation.journal.new_call()
        batch, source = driver.batch, self._random
        rows = source.sample(range(batch.num_envs), source.randint(1, batch.num_envs))
        try:
            found = batch.call_each("render", argument, env_indices=rows)
        except CallError:  # envs were lost during the call
            return
        first = [batch._group.blocks.block_of(row).offset for row in rows]
        expected = [[row - at, argument] for row, at in zip(rows, first, strict=True)]
        if found != expected:
            raise Violation(f"call {argument} of rows {rows} returned {found}")
