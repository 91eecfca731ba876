"""Both halves over a network that drops, copies, delays and reorders; seeded.

The oracle: each step is executed at most once, in order, with the actions that were
submitted for it, and a result belongs to exactly the step that waits for it.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from envserve.blocks import Call, Reset
from envserve.session import ClientState
from envserve.wire import Buffer
from tests.envserve.session_fakes import (
    FakeServer,
    make_client,
    take_outgoing,
)

NUM_EVENTS = 20_000


@dataclass
class Network:
    """Delivers copies of messages at random times, some of them never."""

    random: np.random.Generator
    loss: float
    copies: float
    max_delay: float
    queue: list[tuple[float, int, bool, list[Buffer]]] = field(default_factory=list)
    counter: itertools.count[int] = field(default_factory=itertools.count)

    def send(self, now: float, to_server: bool, frames: list[Buffer]) -> None:
        while self.random.random() >= self.loss:
            # Most are quick; some are so late that others overtake them by far.
            delay = self.max_delay * self.random.random() ** 8
            item = (now + delay, next(self.counter), to_server, frames)
            heapq.heappush(self.queue, item)
            if self.random.random() >= self.copies:
                return


class Simulation:
    """A client that steps, resets and calls without pause, and its oracle."""

    def __init__(self, seed: int, loss: float, copies: float, delay: float) -> None:
        self.random = np.random.default_rng(seed)
        self.network = Network(self.random, loss, copies, delay)
        self.server = FakeServer(builds_at_once=False)
        self.client = make_client(timeout_seconds=1e6, num_envs=6, num_splits=3)
        self.client.connected(0.0)
        self.now = 0.0
        self.num_finished = 0
        self.expected: dict[int, list[tuple[int, ...] | None]] = {}
        self.counts = np.zeros(6, np.int64)
        self.in_flight: dict[int, str] = {}

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.flush()
            self.one_event()
            self.check()

    def flush(self) -> None:
        for frames in take_outgoing(self.client):
            self.network.send(self.now, True, frames)
        for frames in self.server.take_replies():
            self.network.send(self.now, False, frames)

    def one_event(self) -> None:
        pool = self.server.pools.get(11)
        if pool is not None and pool.running and self.random.random() < 0.4:
            block = int(self.random.choice(list(pool.running)))
            self.server.finish(11, block, self.now)
        elif self.client.state is ClientState.READY and self.random.random() < 0.3:
            self.submit()
        else:
            self.pass_time()

    def pass_time(self) -> None:
        deadline = self.client.next_deadline()
        if self.network.queue and self.network.queue[0][0] <= deadline:
            time, _, to_server, frames = heapq.heappop(self.network.queue)
            self.now = max(self.now, time)
            if to_server:
                self.server.receive(b"r", frames, self.now)
            else:
                self.client.receive(frames, self.now)
        else:
            self.now = max(self.now, deadline)
            self.client.advance(self.now)
        if 11 in self.server.pools and self.client.state is ClientState.ATTACHING:
            self.server.build(11, self.now)
        self.server.poll(self.now)

    def submit(self) -> None:
        free = [b for b in self.client.blocks if b.index not in self.in_flight]
        if not free:
            return
        count = int(self.random.integers(1, len(free) + 1))
        chosen = [free[i] for i in self.random.permutation(len(free))[:count]]
        kind = self.random.choice(["step", "step", "step", "reset", "call", "refused"])
        if kind in ("step", "refused"):
            for block in chosen:
                part = slice(block.start, block.stop)
                size = block.stop - block.start
                self.client.rows.action[0][part] = (
                    self.random.integers(0, 100, size) if kind == "step" else 100
                )
            self.client.submit_step([block.index for block in chosen], self.now)
        elif kind == "reset":
            resets = [Reset(block.index) for block in chosen]
            self.client.submit_reset(resets, self.now)
        else:
            chosen = chosen[:1]
            self.client.submit_call(Call(chosen[0].start, "call", "render"), self.now)
        for block in chosen:
            self.in_flight[block.index] = str(kind)
            if kind != "refused":
                part = slice(block.start, block.stop)
                actions = tuple(int(a) for a in self.client.rows.action[0][part])
                self.expected.setdefault(block.index, []).append(
                    actions if kind == "step" else None
                )

    def check(self) -> None:
        assert self.client.state is not ClientState.LOST, self.client.error
        for outcome in self.client.take_finished():
            kind = self.in_flight.pop(outcome.block)
            assert (outcome.error is not None) == (kind == "refused")
            self.num_finished += 1
            block = self.client.blocks[outcome.block]
            part = slice(block.start, block.stop)
            if kind == "step":
                self.counts[part] += 1
                rows = self.client.rows
                np.testing.assert_array_equal(rows.reward[part], rows.action[0][part])
                observed = rows.observation[0][part]
                np.testing.assert_array_equal(observed[:, 0], self.counts[part])
                np.testing.assert_array_equal(observed[:, 1], rows.action[0][part])
            elif kind == "reset":
                self.counts[part] = 0

    def check_executed(self) -> None:
        """Executed is what was submitted, up to one operation still on its way."""
        for index, expected in self.expected.items():
            executed = [
                actions
                for block, actions in self.server.pools[11].executed
                if block == index
            ]
            missing = expected[len(executed) :]
            assert executed == expected[: len(executed)]
            assert len(missing) <= (1 if index in self.in_flight else 0)


@pytest.mark.parametrize(
    ("loss", "copies", "delay"),
    [(0.0, 0.0, 0.01), (0.3, 0.0, 0.5), (0.0, 0.5, 30.0), (0.25, 0.25, 10.0)],
    ids=["calm", "lossy", "copies and late", "all"],
)
def test_steps_are_executed_once_and_results_belong_to_their_steps(
    loss: float, copies: float, delay: float, random_seed: int
) -> None:
    simulation = Simulation(random_seed, loss, copies, delay)
    simulation.run(NUM_EVENTS)
    simulation.check_executed()
    assert simulation.num_finished > NUM_EVENTS // 50
