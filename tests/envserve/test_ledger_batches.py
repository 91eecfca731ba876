"""A ledger verifies batches of local and remote lanes while envs and workers die."""

from __future__ import annotations

import copy
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.client.link.remote_lane import RemoteLane
from envserve.pool.pool import Pool
from envserve.slab import Status
from tests.envserve.conftest import OPENINGS, PATIENCE, MakeBatch, Serve
from tests.envserve.server_process import make_config
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger
from tests.oracle.probe_envs import MODULE

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
        ended = ended if rows is None else rows[ended]
        if self.autoreset == "disabled" and ended.size:
            self.ledger.reset(self.batch.reset(ended), ended)


def fatal_kwargs(journal: Path) -> dict[str, Any]:
    return {
        "length": LENGTH,
        "journal": str(journal),
        "failures": {
            "kill": {"actions": [KILL], "when": "after"},
            "raise": {"actions": [RAISE]},
        },
    }


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_the_ledger_balances_over_local_and_remote_lanes(
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
    tcp_address: str, ipc_address: str, tmp_path: Path, random_seed: int
) -> None:
    batch = BatchEnv.connect(
        LEDGER,
        [tcp_address, ipc_address],
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


class Restless(Fatal):
    """A player that mixes all operations, reuses arrays and keeps earlier results."""

    def __init__(self, batch: BatchEnv, seed: int, autoreset: str) -> None:
        self.reused: dict[tuple[int, int], StepResult] = {}
        self.kept: deque[tuple[StepResult, StepResult]] = deque(maxlen=4)
        super().__init__(batch, seed, autoreset)

    def play(self, num_operations: int) -> None:
        play = (self.step_reusing, self.receive_in_parts, self.reset_some, self.access)
        play[self.random.integers(num_operations)]()
        for result, before in self.kept:  # no later call has changed the arrays
            for array, expected in zip(result[:-1], before[:-1], strict=True):
                np.testing.assert_array_equal(array, expected)
            assert str(result.infos) == str(before.infos)

    def check(self, result: StepResult, rows: Array | None, began: float) -> None:
        super().check(result, rows, began)
        key = len(result.reward), int(self.random.integers(2))
        if not any(result.reward is each.reward for each in self.reused.values()):
            if self.random.random() < 0.2:
                self.reused[key] = result
                self.kept.clear()
            else:
                self.kept.append((result, copy.deepcopy(result)))

    def out(self, num_rows: int) -> StepResult | None:
        return self.reused.get((num_rows, int(self.random.integers(2))))

    def step_reusing(self) -> None:
        self.actions[:] = self.draw()
        self.check(self.batch.step(self.actions, self.out(NUM_ENVS)), None, 0.0)

    def receive_in_parts(self) -> None:
        blocks = self.random.permutation(len(self.batch.blocks)).tolist()
        for block in blocks:
            self.send(self.random.permutation(self.batch.blocks[block]))
        while blocks:
            num_blocks = self.random.integers(1, len(blocks) + 1)
            chosen, blocks = blocks[:num_blocks], blocks[num_blocks:]
            rows = np.sort(np.concatenate([self.batch.blocks[at] for at in chosen]))
            out = self.out(len(rows))
            received, result = self.batch.recv(env_indices=rows, out=out)
            np.testing.assert_array_equal(received, rows)
            self.check(result, received, 0.0)

    def reset_some(self) -> None:
        before = self.batch.last_observation()
        rows = self.random.permutation(NUM_ENVS)[: self.random.integers(1, NUM_ENVS)]
        seeds: list[int] | None = None
        if self.random.random() < 0.5:
            seeds = self.random.integers(1 << 40, size=len(rows)).tolist()
        self.ledger.reset(self.batch.reset(rows, seeds), rows, seeds)
        others = np.setdiff1d(np.arange(NUM_ENVS), rows)
        after = self.batch.last_observation()
        np.testing.assert_array_equal(after[others], before[others])

    def access(self) -> None:
        rows = self.random.permutation(NUM_ENVS)[:3]
        values = self.random.integers(100, size=3).tolist()
        self.batch.set_attr("difficulty", values, rows)
        assert self.batch.get_attr("difficulty", rows) == values


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_the_ledger_balances_over_mixed_operations(
    serve: Serve, tmp_path: Path, autoreset: str, random_seed: int
) -> None:
    server = serve(*OPENINGS)
    lanes: list[Any] = []
    for make, first, num_envs in ((Pool, 0, 3), (RemoteLane, 3, NUM_ENVS - 3)):
        config = make_config(
            LEDGER,
            num_envs,
            num_workers=2,
            num_splits=2 if make is Pool else 1,
            first_env_index=first,
            seed=SEED,
            env_kwargs=fatal_kwargs(tmp_path / "journal"),
            import_modules=(MODULE,),
            autoreset=autoreset,
        )
        lanes.append(
            Pool(config) if make is Pool else RemoteLane(server.address, config)
        )
    for lane in lanes:
        lane.finish_start(time.monotonic() + PATIENCE)
    options: dict[str, Any] = {"autoreset": autoreset, "padding_after": PATIENCE}
    with BatchEnv(lanes, **options) as batch:
        player = Restless(batch, random_seed, autoreset)
        for turn in range(70):
            is_restarted = turn % 20 == 19
            if is_restarted:
                server.kill()
                server.restart()
                server.wait_until_ready()
            player.play(3 if is_restarted else 4)  # a call would raise ServerLost
        assert player.ledger.losses[Status.SERVER_LOST]
    player.ledger.finish(tmp_path / "journal")
