"""Ctrl-C at any line of a client that pads or recovers: the books still balance.

Both halves of a session in memory, of which the server's, and all else that is not the
client's, cannot be interrupted: in truth it is in another process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.testing import Ledger
from tests.envserve.interrupts import Place, run_traced
from tests.envserve.ledger_world import (
    LedgerLane,
    LedgerServer,
    World,
    make_config,
)

SEED = 7
LENGTH = 50
MAX_STEPS = 200
STRIDE = 12
#: Virtual seconds that a call may take.
PATIENCE = 60.0
#: What only clients run.
CLIENT_FILES: Final = tuple(
    f"/envserve/session/{name}.py"
    for name in (
        "attachment",
        "away",
        "client",
        "operations",
        "pairing",
        "recovery",
        "requests",
        "sender",
        "silence",
        "stored_rows",
    )
)


def is_clients(path: str) -> bool:
    return path.endswith(CLIENT_FILES)


Fault = Callable[["Run"], None]


def restart(run: Run) -> None:
    """Its envs are lost, and built anew."""
    run.servers[-1].restart()


def fall_silent(run: Run) -> None:
    """It hears nothing, for longer than its client waits."""
    run.servers[-1].away_until = run.world.now + 6.0


def end_lease(run: Run) -> None:
    """It takes the envs back, as if nothing had been heard for long, and says so."""
    server = run.servers[-1]
    server.carry_out(server.session.poll(run.world.now + 1e6), run.world.now)


#: What fails before which step.
SCENARIOS: Final[dict[str, dict[int, Fault]]] = {
    "restart": {0: restart},
    "restart again": {0: restart, 1: restart},
    "silence": {0: fall_silent},
    "silence and restart": {0: fall_silent, 2: restart},
    "end of lease": {0: end_lease},
}
NUM_STEPS = 6


class Run:
    """A batch of some servers, of which the last one fails and comes back."""

    def __init__(self, folder: Path, num_servers: int) -> None:
        self.world = World(
            SEED,
            request_loss=0.0,
            reply_loss=0.0,
            copies=0.0,
            crashes=0.0,
            strays=0.0,
            max_delay=0.01,
            max_work=2.0,
        )
        self.folder = folder
        options = {"length": LENGTH, "journal": str(folder)}
        self.servers = [
            LedgerServer(self.world, 2, 77 + index) for index in range(num_servers)
        ]
        lanes = [
            LedgerLane(
                self.world,
                server,
                make_config(
                    2, seed=SEED, first_env_index=2 * index, env_kwargs=options
                ),
                session=index + 1,
            )
            for index, server in enumerate(self.servers)
        ]
        self.batch = BatchEnv(lanes)
        num_envs = self.batch.num_envs
        self.ledger = Ledger(
            num_envs, SEED, length=LENGTH, clock=lambda: self.world.now
        )
        with self.deadline():
            self.ledger.reset(self.batch.reset())
        self.num_steps = 0
        self.last: StepResult | None = None

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        self.world.give_up_at = self.world.now + 2 * PATIENCE
        with self.ledger.within(PATIENCE):
            yield

    def step(self, line: int = 0) -> list[Place]:
        """Steps; with a line, traced, and interrupted there."""
        self.num_steps += 1
        actions = np.full(self.batch.num_envs, 100 + self.num_steps)
        self.last = None
        places: list[Place] = []

        def step() -> None:
            self.last = self.batch.step(actions)

        with self.deadline():
            if line:
                places = run_traced(step, line, is_clients)
            else:
                step()
        if self.last is None:
            self.ledger.unanswered(actions)
        else:
            self.ledger.step(actions, self.last)
        return places

    def fail(self, faults: Mapping[int, Fault], line: int) -> list[Place]:
        """Steps while the last server fails, up to an interrupt at this line."""
        places: list[Place] = []
        for number in range(NUM_STEPS):
            if number in faults:
                faults[number](self)
            places += self.step(line - len(places) if line > 0 else line)
            if len(places) == line:
                break
        return places

    def finish(self) -> None:
        """Steps until all is well again, and closes the books."""
        for _ in range(MAX_STEPS):
            self.step()
            if self.last is not None and self.last.valid.all():
                break
        for _ in range(2):
            self.step()
            assert self.last is not None
            assert self.last.valid.all()
        self.ledger.finish(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.batch.close()
        for server in self.servers:
            server.close()


def run(folder: Path, scenario: str, num_servers: int, line: int) -> list[Place]:
    with Run(folder, num_servers) as batch:
        places = batch.fail(SCENARIOS[scenario], line)
        batch.finish()
    return places


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_interrupt_at_any_line_leaves_the_books_in_balance(
    scenario: str, num_servers: int, tmp_path: Path, random_seed: int
) -> None:
    """Another part of the lines each time, all of them within `STRIDE` runs."""
    places = run(tmp_path / "0", scenario, num_servers, -1)
    lines = first_lines(places)
    assert len(lines) > 100
    for line in lines[random_seed % STRIDE :: STRIDE]:
        run(tmp_path / str(line), scenario, num_servers, line)


def first_lines(places: Sequence[Place]) -> list[int]:
    """Returns when each line came for the first time."""
    first: dict[Place, int] = {}
    for line, place in enumerate(places, 1):
        first.setdefault(place, line)
    return list(first.values())
