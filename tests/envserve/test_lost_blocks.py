"""Lost blocks, and blocks that are absent while an operation is in flight."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envserve.envs.seeding import env_seed
from envserve.lane import Outcome, Reset
from envserve.pool.pool import Pool
from envserve.pool.worker_states import WorkerState
from envserve.slab import Status

from .pool_driver import (
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    assert_lost,
    call,
    gather,
    kill,
    reset,
    run_once,
    seeds,
    step,
    wait_for,
)

MakePool = Callable[..., Pool]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Return the path of a gate file; the gate is closed while the file exists."""
    return tmp_path / "gate"


@pytest.fixture
def make_gated(make_pool: PoolMaker, gate: Path) -> MakePool:
    """Make pools, already reset, whose envs wait for an open gate when built."""
    wait = f"while os.path.exists({str(gate)!r}): time.sleep(0.005)"
    return lambda envs, workers: make_pool.and_reset(
        SCRIPT, envs, workers, env_kwargs={"init": wait}
    )


def final_seeds(pool: Pool) -> list[int]:
    return [int(seed) for seed in pool.rows.final_observation[0][:, 0]]


def lose_worker(pool: Pool, gate: Path) -> None:
    """Kill worker 0; its successor is not ready until the gate opens."""
    gate.touch()
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)


def submit(pool: Pool, *blocks: int) -> None:
    pool.rows.action[0][:] = 1
    pool.submit_step(blocks)


def is_serving(pool: Pool) -> bool:
    return pool._workers.all[0].state is WorkerState.SERVING


def test_a_lost_block_is_absent_until_its_envs_are_back_and_costs_one_transition(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(4, 2)
    before = seeds(pool)
    lose_worker(pool, gate)
    assert set(pool.absent) == set()  # no operation is in flight
    submit(pool, 0)
    assert set(pool.absent) == {0}
    for _ in range(3):
        submit(pool, 1)
        gather(pool, [1])
        assert set(pool.absent) == {0}
        assert final_seeds(pool)[:2] == before[:2]
        assert pool.rows.reward[2:].tolist() == [1.0, 1.0]
    gate.unlink()
    (lost,) = gather(pool, [0])
    assert_lost(pool, lost)
    assert set(pool.absent) == set()
    assert final_seeds(pool)[:2] == before[:2]
    assert seeds(pool)[:2] == [env_seed(SEED, row, 1) for row in range(2)]
    assert not any(outcome.faults for outcome in step(pool, 1))
    assert pool.rows.reward.tolist() == [1.0] * 4


def test_collect_returns_once_when_a_block_becomes_absent(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2)
    lose_worker(pool, gate)
    submit(pool, 0)
    began = time.monotonic()
    assert pool.collect(60.0) == []  # the block was lost before
    submit(pool, 1)
    assert [outcome.block for outcome in pool.collect(60.0)] == [1]
    kill(pool.worker_pids[1])
    submit(pool, 1)
    assert pool.collect(60.0, 2) == []  # the block is lost during its step
    assert set(pool.absent) == {0, 1}
    assert time.monotonic() - began < 30.0
    began = time.monotonic()
    assert pool.collect(0.3) == []
    assert time.monotonic() - began >= 0.3
    gate.unlink()
    assert all(outcome.faults for outcome in gather(pool, [0, 1]))


def test_finished_rows_stay_when_their_worker_dies_before_they_are_read(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1, env_kwargs={"length": 1})
    step(pool, 5)
    rows = pool.rows
    observation, final = rows.observation[0].copy(), rows.final_observation[0].copy()
    assert final[:, 2].tolist() == [1, 1]
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)
    assert rows.terminated.all()
    np.testing.assert_array_equal(rows.final_observation[0], final)
    (lost,) = step(pool, 5)
    assert lost.faults
    np.testing.assert_array_equal(rows.final_observation[0], observation)


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("given", [None, 77])
def test_a_row_that_is_reset_while_lost_ends_with_the_observation_of_that_reset(
    make_pool: PoolMaker, is_noticed: bool, given: int | None
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1)
    step(pool, 9)
    kill(pool.worker_pids[0])
    if is_noticed:
        wait_for(pool, lambda: pool.stats()["restarts"] > 0)
    reset(pool, Reset(0, (1,), None if given is None else (given,)))
    expected = pool.rows.observation[0].copy()
    assert expected[0, 2] == 1
    assert expected[1].tolist() == [given or env_seed(SEED, 1, 1), 0, 0, 0]
    (lost,) = step(pool, 5)
    assert_lost(pool, lost)
    np.testing.assert_array_equal(pool.rows.final_observation[0], expected)
    assert seeds(pool) == [env_seed(SEED, 0, 1), given or env_seed(SEED, 1, 1)]
    assert not step(pool, 3)[0].faults


def test_no_observation_of_an_interrupted_reset_is_returned(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1)
    step(pool, 9)
    rows = pool.rows
    before = rows.observation[0].copy()
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)
    wait_for(pool, lambda: is_serving(pool))
    pid = pool.worker_pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    pool.submit_step([0])
    rows.observation[0][1] = 7  # a partial result of the worker
    os.kill(pid, signal.SIGKILL)
    finished: list[Outcome] = []
    while not finished:
        np.testing.assert_array_equal(rows.final_observation[0], before)
        finished = pool.collect(0.05)
    assert_lost(pool, finished[0])
    np.testing.assert_array_equal(rows.final_observation[0], before)
    assert seeds(pool) == [env_seed(SEED, row, 2) for row in range(2)]


@pytest.mark.parametrize("dies_in", ["its reset", "the next env's step"])
def test_a_row_rebuilt_before_its_worker_died_ends_with_its_last_observation(
    make_pool: PoolMaker, gate: Path, dies_in: str
) -> None:
    """Row 0's env raises and is rebuilt before the worker is killed."""
    own, new = env_seed(SEED, 0, 0), env_seed(SEED, 0, 1)
    die = "os.kill(os.getpid(), signal.SIGKILL)"
    fail = f"if self.last_seed == {own}: raise RuntimeError('lost')\n"
    scripts = {"step": f"{fail}if action: {die}"}
    if dies_in == "its reset":
        scripts = {"step": fail, "reset": run_once(gate, die, f"seed == {new}")}
    pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs=scripts)
    before = seeds(pool)
    pool.rows.action[0][:] = [0, 1]
    pool.submit_step([0])
    while not pool.absent and pool.is_busy:
        pool.collect(0.05)
    assert final_seeds(pool) == before
    (outcome,) = gather(pool, [0])
    assert_lost(pool, outcome)
    assert final_seeds(pool) == before
    assert seeds(pool) == [env_seed(SEED, row, 1) for row in range(2)]


def test_a_worker_that_is_lost_again_costs_no_second_transition(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2)
    before = seeds(pool)
    lose_worker(pool, gate)
    submit(pool, 0)
    wait_for(pool, lambda: pool.worker_pids[0] is not None)
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] == 2)
    assert set(pool.absent) == {0}
    assert final_seeds(pool)[0] == before[0]
    gate.unlink()
    gather(pool, [0])
    assert pool.rows.status[0] == Status.WORKER_DIED
    assert final_seeds(pool)[0] == before[0]
    assert seeds(pool)[0] == env_seed(SEED, 0, 2)
    assert not any(outcome.faults for outcome in step(pool, 1))
    assert pool.rows.status.tolist() == [Status.OK, Status.OK]


@pytest.mark.parametrize("loss", ["unnoticed", "absent", "back"])
@pytest.mark.parametrize("given", [None, (5, 6)])
def test_reset_of_a_whole_lost_block_costs_no_transition(
    make_gated: MakePool, gate: Path, loss: str, given: tuple[int, int] | None
) -> None:
    pool = make_gated(4, 2)
    if loss == "unnoticed":
        kill(pool.worker_pids[0])
    else:
        lose_worker(pool, gate)
    if loss == "back":
        gate.unlink()
        wait_for(pool, lambda: is_serving(pool))
    pool.submit_reset([Reset(0, seeds=given)])
    if loss != "unnoticed":
        assert set(pool.absent) == {0}
    gate.unlink(missing_ok=True)
    (outcome,) = gather(pool, [0])
    assert outcome.error is None
    assert not outcome.faults
    expected = given or (env_seed(SEED, 0, 1), env_seed(SEED, 1, 1))
    for _ in range(2):
        assert seeds(pool)[:2] == [*expected]
        assert pool.rows.status.tolist() == [Status.OK] * 4
        assert not any(outcome.faults for outcome in step(pool, 1))
    assert pool.rows.reward.tolist() == [1.0] * 4


def test_reset_in_flight_at_a_loss_is_executed_when_the_envs_are_back(
    make_pool: PoolMaker, gate: Path
) -> None:
    die = run_once(gate, "os.kill(os.getpid(), signal.SIGKILL)", "seed == 5")
    pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs={"reset": die})
    (outcome,) = reset(pool, Reset(0, seeds=(5, 6)))
    assert gate.exists()
    assert not outcome.faults
    assert pool.stats()["restarts"] == 1
    assert seeds(pool) == [5, 6]
    assert not step(pool, 1)[0].faults


def test_call_on_lost_block_reaches_new_env(make_gated: MakePool, gate: Path) -> None:
    pool = make_gated(2, 2)
    assert call(pool, 0, "last_seed")["value"] == env_seed(SEED, 0, 0)
    lose_worker(pool, gate)
    gate.unlink()
    assert call(pool, 0, "last_seed")["value"] == -1  # the new env has never been reset
    step(pool, 1)
    assert pool.rows.status[0] == Status.WORKER_DIED


def test_invalidating_all_blocks_costs_one_transition(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(LEDGER, 4, 2)
    step(pool, 7)
    before = pool.rows.observation[0].copy()
    pids = pool.worker_pids
    pool.submit_step([1])
    pool.invalidate("somebody said so")
    assert not pool.is_busy
    assert set(pool.absent) == set()
    assert pool.collect(0.0) == []
    for outcome in step(pool, 8):
        assert "was replaced: somebody said so" in outcome.faults[0].text
        assert_lost(pool, outcome)
    assert not set(pids) & set(pool.worker_pids)
    assert seeds(pool) == [env_seed(SEED, row, 1) for row in range(4)]
    np.testing.assert_array_equal(pool.rows.final_observation[0][:2], before[:2])
    assert not any(outcome.faults for outcome in step(pool, 9))
    assert pool.rows.reward.tolist() == [9.0] * 4


def test_an_absent_block_that_is_invalidated_ends_with_the_last_observation(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2)
    before = seeds(pool)
    lose_worker(pool, gate)
    submit(pool, 0, 1)
    gather(pool, [1])
    pool.rows.observation[0][0] = 7  # part of the next episode
    pool.invalidate("somebody said so")
    gate.unlink()
    step(pool, 1)
    assert final_seeds(pool) == before
    assert pool.rows.status.tolist() == [Status.WORKER_DIED] * 2
