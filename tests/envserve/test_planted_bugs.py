"""The oracle finds bugs that are planted in real parts, and nothing without them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.slab import Status
from envserve.testing import Ledger, LedgerError
from tests.envserve import planted_worker_bugs
from tests.envserve.ledger_world import (
    LedgerLane,
    LedgerServer,
    World,
    make_config,
)
from tests.envserve.planted_bugs import BUGS, QUICK_WORLD, WORLD_OF
from tests.envserve.planted_worker_bugs import PLANTED

LENGTH = 5
#: Virtual seconds that a call may take: some copies of it may get lost.
PATIENCE = 300.0
SEED = 7


class Trainer:
    """A client that uses its batch in every way there is, and checks what it gets."""

    def __init__(
        self, world: World, servers: list[LedgerServer], seed: int, folder: Path
    ) -> None:
        self.world = world
        self.journal = folder / str(seed)
        self.random = np.random.default_rng(seed)
        options = {"length": LENGTH, "journal": str(self.journal)}
        self.batch = BatchEnv(
            [
                LedgerLane(
                    world,
                    server,
                    make_config(
                        8, seed=seed, first_env_index=8 * index, env_kwargs=options
                    ),
                    session=100 * seed + index,
                )
                for index, server in enumerate(servers)
            ]
        )
        self.ledger = Ledger(
            self.batch.num_envs, seed, length=LENGTH, clock=lambda: world.now
        )
        with self.deadline():
            self.ledger.reset(self.batch.reset())

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        self.world.give_up_at = self.world.now + 2 * PATIENCE
        with self.ledger.within(PATIENCE):
            yield

    def act(self, num_rows: int) -> Any:
        return self.random.integers(0, 1000, num_rows)

    def go_on(self) -> None:
        ways = [self.step, self.send_and_recv, self.reset, self.be_interrupted]
        way = ways[self.random.choice(len(ways), p=[0.5, 0.3, 0.1, 0.1])]
        with self.deadline():
            way()

    def step(self) -> None:
        actions = self.act(self.batch.num_envs)
        self.ledger.step(actions, self.batch.step(actions))

    def send_and_recv(self) -> None:
        """Sends blocks in any order, and takes them as they come."""
        num_blocks = len(self.batch.blocks)
        chosen = self.random.permutation(num_blocks)[
            : self.random.integers(1, num_blocks + 1)
        ]
        rows = np.concatenate([self.batch.blocks[at] for at in chosen])
        rows = self.random.permutation(rows)
        actions = np.full(self.batch.num_envs, -1)
        actions[rows] = self.act(len(rows))
        self.batch.send(actions[rows], rows, together=bool(self.random.integers(2)))
        while self.batch.num_out:
            came, result = self.batch.recv()
            self.ledger.step(actions[came], result, came)

    def reset(self) -> None:
        rows = np.flatnonzero(self.random.random(self.batch.num_envs) < 0.2)
        if len(rows):
            self.ledger.reset(self.batch.reset(rows), rows)

    def be_interrupted(self) -> None:
        """Is cut short in a step, and goes on with the next."""
        actions = self.act(self.batch.num_envs)
        self.world.interrupt_in = int(self.random.integers(1, 20))
        try:
            result = self.batch.step(actions)
        except KeyboardInterrupt:
            self.ledger.unanswered(actions)
        else:
            self.ledger.step(actions, result)
        self.world.interrupt_in = None
        self.step()

    def finish(self) -> None:
        self.ledger.finish(self.journal)


def run(folder: Path, seed: int, num_rounds: int, options: dict[str, Any]) -> World:
    """Two trainers on one server, of which one is on another as well."""
    world = World(seed, **options)
    servers = [LedgerServer(world, 2, boot) for boot in (77, 78)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        trainers = []
        for count in (2, 1):
            trainer = Trainer(world, servers[:count], SEED + count, folder)
            stack.callback(trainer.batch.close)
            trainers.append(trainer)
        for _ in range(num_rounds):
            for trainer in trainers:
                trainer.go_on()
        for trainer in trainers:
            trainer.finish()
    return world


@pytest.mark.parametrize("options", [{}, QUICK_WORLD], ids=["all faults", "quick"])
def test_without_a_bug_all_is_well_under_the_same_faults(
    tmp_path: Path, random_seed: int, options: dict[str, Any]
) -> None:
    world = run(tmp_path, random_seed, 60, options)
    assert world.num_refused_strays > 10


@pytest.mark.parametrize("seed", [207, 238, 241])
def test_books_balance_while_servers_restart_and_fall_silent(
    tmp_path: Path, seed: int
) -> None:
    """These seeds have resets and interrupts while rows are late or lost."""
    run(tmp_path, seed, 60, {"restarts": 0.003, "cuts": 0.01})


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(LedgerError):
        run(tmp_path, 0, 300, WORLD_OF.get(name, {}))


# Real processes.

KILL, RAISE = 998, 999


@pytest.fixture(scope="module")
def planted_launcher() -> Iterator[Launcher]:
    launcher = Launcher(["envserve.testing", planted_worker_bugs.__name__])
    yield launcher
    launcher.close()


def run_pool(launcher: Launcher, folder: Path, bug: str = "") -> Ledger:
    """Loses workers and envs on purpose, with padding until they are back."""
    env_kwargs = {
        "bug": bug,
        "length": LENGTH,
        "journal": str(folder),
        "breakdowns": {
            "kill": {"actions": [KILL], "when": "after"},
            "raise": {"actions": [RAISE]},
        },
    }
    config = make_config(8, PLANTED, num_workers=2, seed=SEED, env_kwargs=env_kwargs)
    config = dataclasses.replace(config, padding_after_seconds=0.0)
    random = np.random.default_rng(0)
    ledger = Ledger(8, SEED, length=LENGTH)
    pool = Pool(config, launcher=launcher)
    with BatchEnv([ready(pool)]) as batch:
        ledger.reset(batch.reset())
        for number in range(48):
            actions = random.integers(0, 998, 8)
            if number % 12 == 7:
                actions[number % 8] = KILL
            if number % 12 == 2:
                actions[number % 8] = RAISE
            with ledger.within(60.0):
                result = batch.step(actions)
            ledger.step(actions, result)
            while (result.status == Status.PENDING).any():
                actions = random.integers(0, 998, 8)
                result = batch.step(actions)
                ledger.step(actions, result)
    ledger.finish(folder)
    return ledger


def ready(pool: Pool) -> Pool:
    while not pool.is_ready:
        pool.collect(0.1)
    return pool


def test_without_a_bug_all_is_well_while_workers_and_envs_are_lost(
    planted_launcher: Launcher, tmp_path: Path
) -> None:
    ledger = run_pool(planted_launcher, tmp_path)
    assert ledger.losses == {Status.WORKER_DIED: 4 * 4, Status.ENV_ERROR: 4}
    assert ledger.num_padding > 0
    assert ledger.num_unseen > 0


@pytest.mark.parametrize("name", planted_worker_bugs.WORKER_BUGS)
def test_a_bug_that_is_planted_in_workers_is_found(
    planted_launcher: Launcher, tmp_path: Path, name: str
) -> None:
    with pytest.raises(LedgerError):
        run_pool(planted_launcher, tmp_path, name)


@pytest.mark.parametrize("name", planted_worker_bugs.POOL_BUGS)
def test_a_bug_that_is_planted_in_the_pool_is_found(
    planted_launcher: Launcher,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted_worker_bugs.POOL_BUGS[name](monkeypatch)
    with pytest.raises(LedgerError):
        run_pool(planted_launcher, tmp_path)
