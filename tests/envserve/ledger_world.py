"""Batches of ledgers over both session halves and a network that fails, in memory.

Everything above the sockets is the real thing, from `BatchEnv` to `ServerSession`; the
network and the pools are made up. Time is virtual, and all chances follow from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envserve.lane import (
    Block,
    Call,
    Fault,
    Outcome,
    PoolConfig,
    Reset,
    make_blocks,
)
from envserve.seeding import env_seed
from envserve.session import (
    ClientSession,
    ClientState,
    Decision,
    EndPool,
    Policy,
    Reply,
    RunReset,
    RunStep,
    ServerSession,
    StartPool,
)
from envserve.slab import Rows, Status, keep_last_observation, write_lost
from envserve.spec import EnvSpec
from envserve.testing import LedgerEnv
from envserve.wire import Attach, Buffer, MessageType, decode, encode
from tests.envserve.session_fakes import FakeServer, take_outgoing

__all__ = ["LEDGER", "LedgerLane", "LedgerServer", "Stuck", "World", "make_config"]

LEDGER = "envserve/Ledger-v0"


class Stuck(Exception):
    """A call waits for what will not come."""


class LedgerOffer:
    names: tuple[str, ...] = (LEDGER,)

    def check(self, name: str) -> None:
        assert name == LEDGER


class LedgerPool:
    """Envs in rows, stepped when an operation ends, which is some time later."""

    def __init__(self, config: PoolConfig, begin: Callable[[int], None]) -> None:
        self.config = config
        self.blocks = make_blocks(
            config.num_envs, config.num_workers, config.num_splits
        )
        probe = LedgerEnv()
        self.spec = EnvSpec(LEDGER, probe.observation_space, probe.action_space)
        self.rows = Rows.allocate(self.spec, config.num_envs)
        self.incarnations = [config.first_incarnation] * config.num_envs
        self._fresh: set[int] = set()
        self.envs = [self._build(row) for row in range(config.num_envs)]
        self.running: dict[int, list[RunStep | Reset]] = {}
        self._begin = begin

    def _build(self, row: int) -> LedgerEnv:
        env = LedgerEnv(**self.config.env_kwargs)
        self._fresh.add(row)
        return env

    def _reset(self, row: int) -> None:
        seed = None
        if row in self._fresh:
            self._fresh.remove(row)
            index = self.config.first_env_index + row
            seed = env_seed(self.config.seed, index, self.incarnations[row])
        self.rows.observation[0][row] = self.envs[row].reset(seed=seed)[0]

    def _step(self, row: int) -> tuple[float, bool, bool]:
        """Steps an env, and resets it if that ends its episode."""
        action = self.rows.action[0][row]
        observation, reward, terminated, truncated, _ = self.envs[row].step(action)
        self.rows.observation[0][row] = observation
        if terminated or truncated:
            self.rows.final_observation[0][row] = observation
            self._reset(row)
        return reward, terminated, truncated

    def run(self, decision: RunStep | RunReset) -> None:
        if isinstance(decision, RunStep):
            begun: list[tuple[int, RunStep | Reset]] = [
                (block, decision) for block in decision.blocks
            ]
        else:
            begun = [(reset.block, reset) for reset in decision.resets]
        for block, operation in begun:
            # One at a time is what the server promises; here, that it may fail to.
            self.running.setdefault(block, []).append(operation)
            self._begin(block)

    def crash(self, index: int, *, applied: bool) -> Outcome:
        """Ends a block's step with its envs; with `applied`, when it was done already.

        Envs write before they answer, so what they did then can be seen.
        """
        self._take(index)
        part = slice(self.blocks[index].start, self.blocks[index].stop)
        for row in range(part.start, part.stop):
            if applied:
                self._step(row)
            self.envs[row].close()
        keep_last_observation(self.rows, part)
        for row in range(part.start, part.stop):
            self.incarnations[row] += 1
            self.envs[row] = self._build(row)
            self._reset(row)
        write_lost(self.rows, part, Status.WORKER_DIED)
        faults = [
            Fault(row, Status.WORKER_DIED, "it died")
            for row in range(part.start, part.stop)
        ]
        return Outcome(index, faults=faults)

    def finish(self, index: int) -> Outcome:
        """Carries out what a block has been asked for."""
        operation = self._take(index)
        block = self.blocks[index]
        rows: Sequence[int] = range(block.start, block.stop)
        if isinstance(operation, Reset):
            rows = operation.env_indices or rows
            for row in rows:
                self._reset(row)
                self._write(row, 0.0, False, False)
            return Outcome(index)
        for row in rows:
            self._write(row, *self._step(row))
        return Outcome(index)

    def is_stepping(self, index: int) -> bool:
        return isinstance(self.running[index][0], RunStep)

    def _take(self, index: int) -> RunStep | Reset:
        operation = self.running[index].pop(0)
        if not self.running[index]:
            del self.running[index]
        return operation

    def _write(
        self, row: int, reward: float, terminated: bool, truncated: bool
    ) -> None:
        self.rows.reward[row] = reward
        self.rows.terminated[row] = terminated
        self.rows.truncated[row] = truncated
        self.rows.status[row] = Status.OK

    def close(self) -> None:
        for env in self.envs:
            env.close()


class LedgerServer(FakeServer):
    """A server half whose pools hold ledgers."""

    def __init__(self, world: World, num_workers: int, boot: int) -> None:
        kwargs = frozenset({"length", "journal"})
        super().__init__(Policy(num_workers=num_workers, allowed_kwargs=kwargs), boot)
        self.session._offer = LedgerOffer()
        self.world = world
        self.ledgers: dict[int, LedgerPool] = {}
        self.away_until = 0.0
        self.num_restarts = 0

    def restart(self) -> None:
        """Ends all envs at once, and begins anew without a memory."""
        self.num_restarts += 1
        self.close()
        self.boot += 100
        self.session = ServerSession(self.policy, LedgerOffer(), self.boot)

    def close(self) -> None:
        for pool in self.ledgers.values():
            pool.close()
        self.ledgers.clear()

    def receive(self, route: bytes, frames: Sequence[Buffer], now: float) -> None:
        if now >= self.away_until:
            super().receive(route, frames, now)

    def carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self.world.send_reply(decision)
            elif isinstance(decision, StartPool):
                session = decision.session
                begin = partial(self.world.begin, self, session)
                pool = LedgerPool(decision.config, begin)
                self.ledgers[session] = pool
                self.carry_out(
                    self.session.pool_ready(
                        session, pool.spec, pool.blocks, pool.rows, now
                    ),
                    now,
                )
            elif isinstance(decision, EndPool):
                self.ledgers.pop(decision.session).close()
                self.carry_out(self.session.pool_closed(decision.session), now)
            else:
                assert isinstance(decision, (RunStep, RunReset))
                self.ledgers[decision.session].run(decision)

    def finish(self, session: int, block: int, now: float) -> None:
        pool = self.ledgers.get(session)
        if pool is None or block not in pool.running:
            return
        if pool.is_stepping(block) and self.world.chance(self.world.crashes):
            finished = pool.crash(block, applied=self.world.chance(0.5))
        else:
            finished = pool.finish(block)
        self.carry_out(self.session.pool_finished(session, [finished]), now)


class World:
    """The clock and the network that all lanes and servers share.

    Attributes:
      now: Virtual seconds.
      request_loss: Chance of a message to the server to get lost.
      reply_loss: The same of one to a client.
      copies: Chance of one more copy.
      crashes: Chance of a step to be the end of its envs.
      strays: Chance that a message of old is followed by one that must be refused.
      restarts: Chance, at each message to a server, of its restart.
      cuts: Chance, at each message to a server, that it can not be reached for a while.
      max_delay: Seconds that a message may take at most.
      max_work: Seconds that an operation may take at most.
      interrupt_in: Events until Ctrl-C, if not None.
      give_up_at: When a call that has not ended never will.
      num_refused_strays: How many of those messages were refused.
    """

    def __init__(
        self,
        seed: int,
        *,
        request_loss: float = 0.1,
        reply_loss: float = 0.1,
        copies: float = 0.2,
        crashes: float = 0.02,
        strays: float = 0.1,
        restarts: float = 0.0,
        cuts: float = 0.0,
        max_delay: float = 8.0,
        max_work: float = 3.0,
    ) -> None:
        self.now = 0.0
        self.request_loss, self.reply_loss = request_loss, reply_loss
        self.copies, self.crashes, self.strays = copies, crashes, strays
        self.restarts, self.cuts = restarts, cuts
        self.max_delay, self.max_work = max_delay, max_work
        self.interrupt_in: int | None = None
        self.give_up_at = math.inf
        self.sessions: dict[int, tuple[ClientSession, LedgerServer]] = {}
        self.num_refused_strays = 0
        self._random = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def chance(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._counter), event))

    def begin(self, server: LedgerServer, session: int, block: int) -> None:
        """Has an operation end after a while."""
        delay = self.max_work * self._random.random() ** 4
        self.at(delay, lambda: server.finish(session, block, self.now))

    def send_reply(self, reply: Reply) -> None:
        session = int.from_bytes(reply.route)
        if session not in self.sessions:
            self.num_refused_strays += (
                decode(reply.frames).type is MessageType.ERROR
            )  # what was answered to a stray
            return
        client, server = self.sessions[session]
        if self.now < server.away_until:
            return
        # What is not copied now would change with the rows.
        frames = [bytes(frame) for frame in reply.frames]
        self._send(self.reply_loss, lambda: client.receive(frames, self.now))

    def _send(self, loss: float, deliver: Callable[[], None]) -> None:
        while not self.chance(loss):
            # Most are quick; some are so late that others overtake them by far.
            self.at(self.max_delay * self._random.random() ** 6, deliver)
            if not self.chance(self.copies):
                return

    def _send_request(self, session: int, frames: list[Buffer]) -> None:
        _, server = self.sessions[session]
        route = session.to_bytes(8)
        if self.chance(self.restarts):
            server.restart()
        if self.chance(self.cuts):
            server.away_until = self.now + 20.0 * self._random.random()
        receive = partial(server.receive, route, frames)
        self._send(self.request_loss, lambda: receive(self.now))
        if self.chance(self.strays):
            self._send_stray(server, frames)

    def _send_stray(self, server: LedgerServer, frames: list[Buffer]) -> None:
        """Sends a step as a peer would that is of the past, or has lost count."""
        message = decode(frames)
        if message.type is not MessageType.STEP:
            return
        message.request += 1_000_000
        message.body = bytes(len(message.body))  # all actions 0
        kind = self._random.integers(3)
        if kind == 0:
            message.boot ^= 1
        elif kind == 1:
            message.epoch -= 1
        seq_ahead = 1000 if kind == 2 else 1
        message.entries = tuple(
            (block, seq + seq_ahead) for block, seq in message.entries
        )
        stray = encode(message)
        self.at(
            self.max_delay * self._random.random(),
            lambda: server.receive(b"stray", stray, self.now),
        )

    def go_on(self) -> None:
        """Lets the next event happen; raises Stuck when it is too late for any."""
        if self.now > self.give_up_at:
            raise Stuck(f"no answer until {self.give_up_at:g}")
        for session, (client, _) in self.sessions.items():
            for frames in take_outgoing(client):
                self._send_request(session, frames)
        deadline = min(client.next_deadline() for client, _ in self.sessions.values())
        if self._queue and self._queue[0][0] <= deadline:
            time, _, event = heapq.heappop(self._queue)
            self.now = max(self.now, time)
            event()
        else:
            self.now = max(self.now, deadline)
            for client, _ in self.sessions.values():
                client.advance(self.now)
        if self.interrupt_in is not None:
            self.interrupt_in -= 1
            if self.interrupt_in <= 0:
                self.interrupt_in = None
                raise KeyboardInterrupt


class LedgerLane:
    """A client half as a lane; whoever waits lets the world go on."""

    name = "memory"

    def __init__(
        self, world: World, server: LedgerServer, config: PoolConfig, session: int
    ) -> None:
        attach = Attach(
            env_name=config.env_name,
            num_envs=config.num_envs,
            num_splits=config.num_splits,
            seed=config.seed,
            first_env_index=config.first_env_index,
            env_kwargs=config.env_kwargs,
            autoreset=config.autoreset,
        )
        self._world = world
        self._client = ClientSession(
            self.name,
            attach,
            session=session,
            now=world.now,
            timeout_seconds=1e6,
            server_lost_after_seconds=1e6,
        )
        world.sessions[session] = (self._client, server)
        self._session = session
        self._client.connected(world.now)
        while self._client.state is not ClientState.READY:
            self._go_on()
        self._reader, self._writer = os.pipe()
        os.write(self._writer, b"!")  # always readable: the world never waits

    @property
    def spec(self) -> EnvSpec:
        return self._client.spec

    @property
    def num_envs(self) -> int:
        return self._client.blocks[-1].stop

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._client.blocks

    @property
    def rows(self) -> Rows:
        return self._client.rows

    @property
    def is_busy(self) -> bool:
        return self._client.settle()

    def submit_step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> None:
        self._client.submit_step(blocks, self._world.now, ticket, is_alone)

    def submit_reset(self, resets: Sequence[Reset], ticket: int = 0) -> None:
        self._client.submit_reset(resets, self._world.now, ticket)

    def submit_call(self, call: Call, ticket: int = 0) -> None:
        self._client.submit_call(call, self._world.now, ticket)

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        while timeout_seconds > 0 and not self._client.has_finished:
            if not self._client.num_in_flight:
                return []
            self._go_on()
        if timeout_seconds <= 0:
            self._go_on()
        return self._client.take_finished()

    def _go_on(self) -> None:
        self._world.go_on()
        if self._client.error is not None:
            raise Stuck(f"the session was lost: {self._client.error}")

    def stats(self) -> Mapping[str, int]:
        return {}

    def fileno(self) -> int:
        return self._reader

    def begin_close(self) -> None:
        """Leaves the session to the world, which ends with it."""

    def close(self) -> None:
        del self._world.sessions[self._session]
        os.close(self._reader)
        os.close(self._writer)


def make_config(
    num_envs: int, env_name: str = LEDGER, num_workers: int = 1, **changes: Any
) -> PoolConfig:
    return PoolConfig(
        env_name=env_name,
        num_envs=num_envs,
        num_workers=num_workers,
        num_splits=2,
        **changes,
    )
