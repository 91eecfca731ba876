"""The oracle beside batches over every kind of lane, with envs and workers that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.slab import Status
from envserve.testing import Ledger
from tests.envserve.conftest import MakeBatch, StartServer

LEDGER = "envserve/Ledger-v0"
NUM_ENVS = 8
LENGTH = 6
SEED = 5
KILL, RAISE = 998, 999
SECONDS = 60.0

Array = np.ndarray[Any, Any]


class Checked:
    """A batch of ledgers, driven and checked; some of its actions are fatal."""

    def __init__(self, batch: BatchEnv, seed: int, autoreset: str = "same_step"):
        self.batch = batch
        self.random = np.random.default_rng(seed)
        self.autoreset = autoreset
        self.ledger = Ledger(NUM_ENVS, SEED, length=LENGTH, autoreset=autoreset)
        self.ledger.reset(batch.reset())
        self.num_steps = 0

    def act(self) -> Array:
        self.num_steps += 1
        actions = self.random.integers(0, 998, NUM_ENVS)
        fatal = {5: KILL, 12: RAISE}.get(self.num_steps % 15)
        if fatal is not None:
            actions[self.random.integers(NUM_ENVS)] = fatal
        return actions

    @property
    def is_enough(self) -> bool:
        losses = self.ledger.losses
        return (
            self.num_steps >= 100
            and min(losses[Status.WORKER_DIED], losses[Status.ENV_ERROR]) >= 3
        )

    def step(self) -> None:
        actions = self.act()
        with self.ledger.within(SECONDS):
            result = self.batch.step(actions)
        self.ledger.step(actions, result)
        ended = np.flatnonzero(result.terminated | result.truncated)
        if self.autoreset == "disabled" and ended.size:
            self.ledger.reset(self.batch.reset(ended), ended)

    def send_and_recv(self) -> None:
        actions = self.act()
        with self.ledger.within(SECONDS):
            for split in self.random.permutation(len(self.batch.splits)):
                rows = self.batch.splits[split]
                self.batch.send(actions[rows], rows)
            while self.batch.num_out:
                rows, result = self.batch.recv()
                self.ledger.step(actions[rows], result, rows)

    def finish(self, journal: Path) -> None:
        self.batch.close()
        self.ledger.finish(journal)


def fatal_kwargs(journal: Path) -> dict[str, Any]:
    return {
        "length": LENGTH,
        "journal": str(journal),
        "breakdowns": {
            "kill": {"actions": [KILL], "when": "after"},
            "raise": {"actions": [RAISE]},
        },
    }


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_books_balance_over_every_kind_of_lane(
    make_batch: MakeBatch, tmp_path: Path, autoreset: str, random_seed: int
) -> None:
    batch = make_batch(
        LEDGER,
        NUM_ENVS,
        2,
        seed=SEED,
        env_kwargs=fatal_kwargs(tmp_path / "journal"),
        autoreset=autoreset,
    )
    checked = Checked(batch, random_seed, autoreset)
    while not checked.is_enough:
        checked.step()
    checked.finish(tmp_path / "journal")


def test_books_balance_over_several_servers_in_splits(
    start_server: StartServer, tmp_path: Path, random_seed: int
) -> None:
    addresses = [start_server(), start_server(f"ipc://{tmp_path}/envs")]
    batch = BatchEnv.connect(
        LEDGER,
        addresses,
        NUM_ENVS,
        seed=SEED,
        num_splits=2,
        env_kwargs=fatal_kwargs(tmp_path / "journal"),
    )
    with batch:
        checked = Checked(batch, random_seed)
        while not checked.is_enough:
            checked.step()
            checked.send_and_recv()
        checked.finish(tmp_path / "journal")
