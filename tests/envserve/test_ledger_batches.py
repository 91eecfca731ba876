"""A ledger verifies batches over every kind of lane while envs and workers die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.slab import Status
from tests.envserve.conftest import MakeBatch, StartServer
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger

LEDGER = "envserve/Ledger-v0"
NUM_ENVS = 8
LENGTH = 6
SEED = 5
KILL, RAISE = 998, 999

Array = np.ndarray[Any, Any]


class Fatal(BatchDriver):
    """A player that sometimes takes an action that kills an env or its worker."""

    num_actions = KILL
    num_steps = 0

    def __init__(self, batch: BatchEnv, seed: int, autoreset: str = "same_step"):
        ledger = Ledger(NUM_ENVS, SEED, length=LENGTH, autoreset=autoreset)
        super().__init__(batch, ledger, np.random.default_rng(seed))
        self.autoreset = autoreset

    def draw(self, num_rows: int | None = None) -> Array:
        self.num_steps += 1
        actions = super().draw(num_rows)
        fatal = {5: KILL, 12: RAISE}.get(self.num_steps % 15)
        if fatal is not None:
            actions[self.random.integers(len(actions))] = fatal
        return actions

    @property
    def is_enough(self) -> bool:
        losses = self.ledger.losses
        return (
            self.num_steps >= 150
            and min(losses[Status.WORKER_DIED], losses[Status.ENV_ERROR]) >= 3
        )

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        super().check(result, rows, began)
        ended = np.flatnonzero(result.terminated | result.truncated)
        if self.autoreset == "disabled" and ended.size:
            self.ledger.reset(self.batch.reset(ended), ended)


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
def test_the_ledger_balances_over_every_kind_of_lane(
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
    player = Fatal(batch, random_seed, autoreset)
    while not player.is_enough:
        player.step()
    batch.close()
    player.ledger.finish(tmp_path / "journal")


def test_the_ledger_balances_over_several_servers_in_splits(
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
        player = Fatal(batch, random_seed)
        while not player.is_enough:
            player.step()
            for split in player.random.permutation(len(batch.splits)):
                player.send(batch.splits[split])
            player.receive_rest()
    player.ledger.finish(tmp_path / "journal")
