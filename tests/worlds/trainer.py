"""A trainer: uses a batch over real sessions in every way there is, and checks it.

Its calls wait, and whoever waits lets the world go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from envserve.client import BatchEnv, StepResult
from envserve.errors import CallError, EnvserveError, EnvTimeout, ProtocolError
from envserve.wire.bodies import Attach, pack_options
from tests.oracle.ledger import Ledger
from tests.oracle.player import Player
from tests.worlds.host import Host
from tests.worlds.journal import Violation, check_levels
from tests.worlds.lane import WorldLane
from tests.worlds.pool import LENGTH, SPEC
from tests.worlds.profile import log_uniform

if TYPE_CHECKING:
    from tests.worlds.world import World

_START_SECONDS: Final = 100.0
#: Who may be told that an env of somebody else is slow has this much patience.
_PADDING_AFTER: Final = (0.0, 0.1, 2.0, math.inf)


class Trainer:
    """Uses one batch after the other.

    Attributes:
      player: The batch, with its books; None between two batches.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledgers: list[Ledger] = []
        self.player: Player | None = None
        self._random = world.clock.random

    # Batches.

    def go_on(self) -> None:
        try:
            if self.player is None:
                self._begin_somewhere()
            else:
                self._use(self.player)
        except EnvserveError as error:
            if isinstance(error, ProtocolError):
                raise
            self.close()
            self.wait(log_uniform(self._random, 0.1, 2.0))

    def _begin_somewhere(self) -> None:
        source, world = self._random, self.world
        is_spread = source.random() < 0.7
        hosts = source.sample(world.hosts, len(world.hosts) if is_spread else 1)
        most = min(4, world.profile.total_envs)
        sizes = [source.randint(1, most) for _ in hosts]
        self.begin(hosts, sizes, source.randint(1, 2), source.choice(_PADDING_AFTER))

    def begin(
        self,
        hosts: Sequence[Host],
        sizes: Sequence[int],
        num_splits: int,
        padding_after: float,
    ) -> None:
        """Has a batch of so many envs on each host, and resets them."""
        world, seed = self.world, next(self.world.numbers)
        lanes: list[WorldLane] = []
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
                lanes.append(WorldLane(world, host, attach))
                first += num_envs
            for lane in lanes:
                lane.finish_start(world.clock.now + _START_SECONDS)
        except EnvserveError:
            for lane in lanes:
                lane.close()
            raise
        batch = BatchEnv(lanes, padding_after=padding_after)
        ledger = Ledger(first, seed, length=LENGTH, clock=lambda: world.clock.now)
        self.ledgers.append(ledger)
        numbers = np.random.default_rng(seed)
        try:
            self.player = Player(batch, ledger, numbers, math.inf)
        except EnvserveError:
            batch.close()
            raise

    def close(self) -> None:
        if self.player is not None:
            self.player.batch.close()
            self.player = None

    def wait(self, seconds: float) -> None:
        until = self.world.clock.now + seconds
        while self.world.clock.now < until:
            self.world.step(until)

    def finish(self) -> None:
        """Steps until every row was valid at once, and closes."""
        while self.player is None or not self._are_all_valid(self.player):
            if self.player is None:
                self.go_on()
        self.close()

    def _are_all_valid(self, player: Player) -> bool:
        try:
            return bool(self.step(player).valid.all())
        except EnvserveError:
            self.close()
            return False

    # What it does with one.

    def _use(self, player: Player) -> None:
        ways: list[Callable[[Player], Any]]
        ways = [self.step, self._send_and_receive, self._reset, self._interrupt]
        ways.append(self._call)
        (way,) = self._random.choices(ways, [0.5, 0.3, 0.08, 0.08, 0.04])
        way(player)

    def step(self, player: Player) -> StepResult:
        try:
            return player.step()
        except BaseException:
            player.ledger.unanswered(player.actions)
            raise

    def _send_and_receive(self, player: Player) -> None:
        """Sends blocks in any order, and takes them as they come."""
        batch, source = player.batch, self._random
        out: set[int] = set()
        num_sends = source.randint(1, 4)
        try:
            while num_sends or out:
                idle = [b for b in batch.blocks if out.isdisjoint(b.tolist())]
                if num_sends and idle and (not out or source.random() < 0.5):
                    num_sends -= 1
                    chosen = source.sample(idle, source.randint(1, len(idle)))
                    rows = player.random.permutation(np.concatenate(chosen))
                    out.update(rows.tolist())
                    player.send(rows, together=source.random() < 0.5)
                else:
                    out.difference_update(self._receive(player, len(out)))
        except EnvserveError:
            left = np.array(sorted(out), np.int64)
            player.ledger.unanswered(player.actions[left], left)
            raise

    def _receive(self, player: Player, num_in_flight: int) -> list[int]:
        """Waits for some of the rows that are out; in vain, or not for long, or cut."""
        source = self._random
        self._plan_interrupt(0.02)
        timeout = source.choice((None, None, None, 0.0, 1.0, 10.0))
        try:
            rows, _ = player.receive(timeout, source.randint(1, num_in_flight))
        except (EnvTimeout, KeyboardInterrupt):
            return []
        finally:
            self.world.interrupt_in = None
        return rows.tolist()

    def _reset(self, player: Player) -> None:
        rows = np.flatnonzero(player.random.random(player.batch.num_envs) < 0.3)
        source, options, seeds = self._random, None, None
        if source.random() < 0.5:
            options = {"level": self.world.journal.new_level()}
        if source.random() < 0.5:
            seeds = [source.choice((None, source.getrandbits(62))) for _ in rows]
        if len(rows):
            observation = player.batch.reset(rows, seeds, options=options)
            player.ledger.reset(observation, rows, seeds)
            encoded = pack_options(options)
            check_levels(player.batch.reset_infos, rows.tolist(), encoded)

    def _interrupt(self, player: Player) -> None:
        """Is cut short in a step, and goes on with another."""
        self._plan_interrupt(1.0)
        try:
            self.step(player)
        except KeyboardInterrupt:
            pass
        finally:
            self.world.interrupt_in = None

    def _plan_interrupt(self, probability: float) -> None:
        if self._random.random() < probability:
            self.world.interrupt_in = self._random.randint(1, 40)

    def _call(self, player: Player) -> None:
        argument = self.world.journal.new_call()
        batch, source = player.batch, self._random
        rows = source.sample(range(batch.num_envs), source.randint(1, batch.num_envs))
        try:
            found = batch.call_each("render", argument, env_indices=rows)
        except CallError:  # envs were lost meanwhile
            return
        first = [batch._group.blocks.block_of(row).offset for row in rows]
        expected = [[row - at, argument] for row, at in zip(rows, first, strict=True)]
        if found != expected:
            raise Violation(f"call {argument} of {rows} was answered with {found}")
