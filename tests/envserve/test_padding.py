"""Rows of a lost block while its worker is being replaced."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.client.local_lane import LocalLane
from envserve.lane import Reset
from envserve.pool.pool import Pool
from envserve.seeding import env_seed
from envserve.slab import Status
from tests.envserve import gated_env
from tests.envserve.conftest import StartServer, bind_for
from tests.envserve.gated_env import GATED
from tests.envserve.pool_driver import (
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    call,
    gather,
    kill,
    reset,
    step,
    wait_for,
)
from tests.envserve.server_process import make_config

#: Steps of an episode that does not end in a test.
LONG = 1_000_000

MakePool = Callable[..., Pool]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Closed while it exists."""
    return tmp_path / "gate"


@pytest.fixture
def make_gated(make_pool: PoolMaker, gate: Path) -> MakePool:
    """Makes pools whose envs wait for the gate when they are built."""
    wait = f"while os.path.exists({str(gate)!r}): time.sleep(0.005)"

    def make(num_envs: int, num_workers: int, padding_after: float = 0.0) -> Pool:
        return make_pool(
            SCRIPT,
            num_envs,
            num_workers,
            env_kwargs={"init": wait},
            padding_after_seconds=padding_after,
        )

    return make


def seeds(pool: Pool) -> list[int]:
    return [int(seed) for seed in pool.rows.observation[0][:, 0]]


def lose_worker(pool: Pool, gate: Path, worker: int = 0) -> None:
    """Kills a worker whose successor will not be ready before the gate opens."""
    gate.touch()
    kill(pool.worker_pids[worker])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)


def step_once(pool: Pool, *blocks: int, is_alone: bool = False) -> list[bool]:
    """Steps blocks with action 1; tells which came back as padding."""
    pool.rows.action[0][:] = 1
    pool.submit_step(blocks, is_alone=is_alone)
    return [outcome.is_padding for outcome in gather(pool, blocks)]


def assert_pending(pool: Pool, rows: slice) -> None:
    assert set(pool.rows.status[rows]) == {Status.PENDING}
    for flags in (pool.rows.terminated, pool.rows.truncated, pool.rows.reward):
        assert not flags[rows].any()


def test_lost_rows_are_pending_until_their_envs_are_back_and_then_lost_once(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(4, 2)
    reset(pool)
    before = seeds(pool)
    lose_worker(pool, gate)
    for _ in range(3):
        assert step_once(pool, 0, 1) == [True, False]
        assert_pending(pool, slice(0, 2))
        assert seeds(pool) == before
        assert pool.rows.reward[2:].tolist() == [1.0, 1.0]
    gate.unlink()
    (lost, _) = step(pool, 1)
    while lost.is_padding:
        assert_pending(pool, slice(0, 2))
        assert seeds(pool) == before
        (lost, _) = step(pool, 1)
    assert [fault.status for fault in lost.faults] == [Status.WORKER_DIED] * 2
    assert set(pool.rows.status[:2]) == {Status.WORKER_DIED}
    assert pool.rows.truncated[:2].all()
    assert pool.rows.final_observation[0][:2, 0].tolist() == before[:2]
    assert seeds(pool)[:2] == [env_seed(SEED, row, 1) for row in range(2)]
    (after, _) = step(pool, 1)
    assert not after.faults
    assert pool.rows.reward.tolist() == [1.0] * 4


def test_a_step_waits_a_moment_for_envs_that_come_back_soon(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2, padding_after=30.0)
    reset(pool)
    lose_worker(pool, gate)
    pool.submit_step([0, 1])
    assert [outcome.block for outcome in gather(pool, [1])] == [1]
    assert pool.collect(0.3) == []
    gate.unlink()
    (lost,) = gather(pool, [0])
    assert lost.faults
    assert not lost.is_padding


def test_envs_that_hang_in_their_reset_are_replaced_however_often_they_are_stepped(
    make_pool: PoolMaker,
) -> None:
    hang = f"if seed == {env_seed(SEED, 0, 1)}: time.sleep(3600)"
    pool = make_pool(
        SCRIPT,
        2,
        2,
        env_kwargs={"reset": hang},
        padding_after_seconds=0.0,
        reset_timeout_seconds=2.0,
    )
    reset(pool)
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)
    give_up_at = time.monotonic() + 30.0
    while any(step_once(pool, 0, 1)):
        assert time.monotonic() < give_up_at
    assert pool.stats()["restarts"] == 2
    assert seeds(pool)[0] == env_seed(SEED, 0, 2)


def test_a_reset_gives_the_same_episode_however_far_the_envs_have_come(
    make_pool: PoolMaker, gate: Path
) -> None:
    wait = f"while os.path.exists({str(gate)!r}): time.sleep(0.005)"
    observe = "self.last_seed = int(self.np_random.integers(2**32))"
    script = f"{wait}\nif seed is None: {observe}"
    pool = make_pool(SCRIPT, 2, 2, env_kwargs={"reset": script})
    reset(pool)
    gate.touch()
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.is_at_work(pool._workers[0]))
    pool.submit_reset([Reset(0)])
    gate.unlink()
    gather(pool, [0])
    assert seeds(pool)[0] == env_seed(SEED, 0, 1)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_step_waits_if_nothing_at_all_is_alive(
    make_gated: MakePool, gate: Path, num_workers: int
) -> None:
    pool = make_gated(2, num_workers)
    reset(pool)
    for worker in range(num_workers):
        lose_worker(pool, gate, worker)
        wait_for(pool, lambda: pool.stats()["restarts"] == worker + 1)  # noqa: B023
    blocks = [block.index for block in pool.blocks]
    assert all(step_once(pool, *blocks))
    pool.submit_step(blocks, is_alone=True)
    assert pool.collect(0.3) == []
    gate.unlink()
    outcomes = gather(pool, blocks)
    assert any(not outcome.is_padding for outcome in outcomes)
    lost = next(outcome for outcome in outcomes if not outcome.is_padding)
    assert lost.faults


def test_envs_come_back_while_nobody_steps(make_gated: MakePool, gate: Path) -> None:
    pool = make_gated(2, 2)
    reset(pool)
    lose_worker(pool, gate)
    assert step_once(pool, 0, 1) == [True, False]
    gate.unlink()
    wait_for(pool, lambda: pool.next_deadline() is None)
    assert seeds(pool) == [env_seed(SEED, row, 0) for row in range(2)]
    assert step_once(pool, 0, 1) == [False, False]
    assert pool.rows.status.tolist() == [Status.WORKER_DIED, Status.OK]
    assert seeds(pool) == [env_seed(SEED, 0, 1), env_seed(SEED, 1, 0)]


def test_rows_that_were_answered_stay_when_their_worker_dies_before_they_are_read(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 2, 1, env_kwargs={"length": 1})
    reset(pool)
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


def test_a_row_that_is_reset_while_its_block_is_lost_ends_with_what_that_gave(
    make_pool: PoolMaker,
) -> None:
    kills = {"kill": {"actions": [9], "when": "after"}}
    pool = make_pool(
        LEDGER, 2, 1, env_kwargs={"breakdowns": kills}, padding_after_seconds=0.0
    )
    reset(pool)
    (padded,) = step(pool, 9)
    assert padded.is_padding
    observed = pool.rows.observation[0]
    reset(pool, Reset(0, (1,)))
    expected = observed.copy()
    assert expected[1].tolist() == [env_seed(SEED, 1, 1), 0, 0, 0]
    while step(pool, 5)[0].is_padding:
        np.testing.assert_array_equal(observed, expected)
    np.testing.assert_array_equal(pool.rows.final_observation[0], expected)


def test_padding_shows_nothing_of_envs_that_died_while_they_were_published(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 2, 1, padding_after_seconds=0.0)
    reset(pool)
    before = pool.rows.observation[0].copy()
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] > 0)
    wait_for(pool, lambda: pool._losses[0].is_ready)
    pid = pool.worker_pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    pool.submit_step([0])
    pool.rows.observation[0][1] = 7  # half of what the worker would have written
    os.kill(pid, signal.SIGKILL)
    (padded,) = gather(pool, [0])
    assert padded.is_padding
    np.testing.assert_array_equal(pool.rows.observation[0], before)
    while step(pool, 5)[0].is_padding:
        pass
    np.testing.assert_array_equal(pool.rows.final_observation[0], before)


def test_a_worker_that_is_lost_again_costs_no_second_transition(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2)
    reset(pool)
    lose_worker(pool, gate)
    assert step_once(pool, 0, 1) == [True, False]
    wait_for(pool, lambda: pool.worker_pids[0] is not None)
    kill(pool.worker_pids[0])
    wait_for(pool, lambda: pool.stats()["restarts"] == 2)
    assert step_once(pool, 0, 1) == [True, False]
    gate.unlink()
    while step_once(pool, 0, 1)[0]:
        assert_pending(pool, slice(0, 1))
    assert pool.rows.status[0] == Status.WORKER_DIED
    assert seeds(pool)[0] == env_seed(SEED, 0, 2)
    assert step_once(pool, 0, 1) == [False, False]
    assert pool.rows.status.tolist() == [Status.OK, Status.OK]


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("given", [None, (5, 6)])
def test_reset_of_a_block_that_is_pending_leaves_nothing_to_pay(
    make_gated: MakePool, gate: Path, is_ready: bool, given: tuple[int, int] | None
) -> None:
    pool = make_gated(4, 2)
    reset(pool)
    lose_worker(pool, gate)
    assert step_once(pool, 0, 1) == [True, False]
    if is_ready:
        gate.unlink()
        wait_for(pool, lambda: pool.next_deadline() is None)
    pool.submit_reset([Reset(0, seeds=given)])
    gate.unlink(missing_ok=True)
    (outcome,) = gather(pool, [0])
    assert outcome.error is None
    expected = given or (env_seed(SEED, 0, 1), env_seed(SEED, 1, 1))
    assert seeds(pool)[:2] == [*expected]
    assert pool.rows.status[:2].tolist() == [Status.OK] * 2
    assert step_once(pool, 0, 1) == [False, False]
    assert pool.rows.status.tolist() == [Status.OK] * 4


def test_reset_of_some_rows_makes_what_was_prepared_useless(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(4, 2)
    reset(pool)
    lose_worker(pool, gate)
    assert step_once(pool, 0, 1) == [True, False]
    gate.unlink()
    wait_for(pool, lambda: pool.next_deadline() is None)
    reset(pool, Reset(0, env_indices=(1,), seeds=(77,)))
    assert seeds(pool)[1] == 77
    while step_once(pool, 0, 1)[0]:
        assert_pending(pool, slice(0, 2))
    assert set(pool.rows.status[:2]) == {Status.WORKER_DIED}
    assert seeds(pool)[:2] == [env_seed(SEED, 0, 1), 77]


def test_call_on_a_block_that_is_pending_reaches_its_new_env(
    make_gated: MakePool, gate: Path
) -> None:
    pool = make_gated(2, 2)
    reset(pool)
    lose_worker(pool, gate)
    assert step_once(pool, 0, 1) == [True, False]
    gate.unlink()
    assert call(pool, 0, "last_seed")["value"] == env_seed(SEED, 0, 1)
    while step_once(pool, 0, 1)[0]:
        assert_pending(pool, slice(0, 1))
    assert pool.rows.status[0] == Status.WORKER_DIED


# In a batch.


class Halves:
    """A batch of two lanes, the first of which can be lost for as long as we like."""

    def __init__(self, batch: BatchEnv, gate: Path, kill_worker: Callable[[], None]):
        self.batch = batch
        self.gate = gate
        self._kill_worker = kill_worker
        self.count = 0

    @property
    def action(self) -> int:
        """The action of the last step, another one each time."""
        return self.count % 1000

    def lose(self) -> None:
        self.gate.touch()
        self._kill_worker()

    def step(self) -> StepResult:
        self.count += 1
        return self.batch.step(np.full(self.batch.num_envs, self.action))

    def step_until(self, status: Status) -> StepResult:
        for _ in range(100_000):
            result = self.step()
            if result.status[0] == status:
                return result
        raise AssertionError(f"no row was {status!r}")


def gated_lane(index: int, gate: Path) -> LocalLane:
    lane = LocalLane(
        make_config(
            GATED,
            2,
            first_env_index=2 * index,
            env_kwargs={"gate": str(gate), "length": LONG},
            import_modules=(gated_env.__name__,),
            padding_after_seconds=0.0,
        )
    )
    lane.finish_start(math.inf)
    return lane


@pytest.fixture(params=["local", "ipc"])
def halves(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    gate: Path,
    start_server: StartServer,
) -> Iterator[Halves]:
    if request.param == "local":
        lanes = [gated_lane(0, gate), gated_lane(1, tmp_path / "always open")]
        with BatchEnv(lanes) as batch:
            batch.reset()
            yield Halves(batch, gate, lambda: kill(lanes[0]._pool.worker_pids[0]))
        return
    options = {"gate": str(gate), "length": LONG}
    address = start_server(
        bind_for("ipc", tmp_path),
        *("--import", gated_env.__name__, "--allow-kwarg", "gate", "--expose", "pid"),
        *("--padding-after", "0"),
    )
    with BatchEnv.connect(GATED, [address], 4, env_kwargs=options) as batch:
        batch.reset()
        pid = batch.call(0, "pid")
        yield Halves(batch, gate, lambda: os.kill(pid, signal.SIGKILL))


def test_the_others_go_on_while_a_lost_half_is_pending(halves: Halves) -> None:
    first = halves.step()
    assert first.valid.all()
    last = first.observation[:2].copy()
    halves.lose()
    result = halves.step_until(Status.PENDING)
    seen = halves.count
    for _ in range(50):
        assert result.status[:2].tolist() == [Status.PENDING] * 2
        assert not (result.truncated | result.terminated).any()
        assert result.valid.tolist() == [False, False, True, True]
        assert result.reward.tolist() == [0, 0, halves.action, halves.action]
        assert result.observation[2:, 2].tolist() == [halves.count] * 2
        result = halves.step()
    assert halves.count >= seen + 50
    halves.gate.unlink()
    lost = halves.step_until(Status.WORKER_DIED)
    assert lost.truncated.tolist() == [True, True, False, False]
    assert lost.infos[0]["fault"]["status"] == "WORKER_DIED"
    assert (lost.observation[:2, 0] != last[:, 0]).all()
    assert lost.observation[:2, 1:].tolist() == [[0, 0, 0]] * 2
    after = halves.step()
    assert after.valid.all()
    assert after.observation[:2, 2].tolist() == [1, 1]
    stats = halves.batch.stats()
    assert (stats.steps, stats.rows) == (halves.count, 4 * halves.count)
    assert stats.invalid_rows["WORKER_DIED"] == 2
    assert stats.invalid_rows["PENDING"] >= 100
    assert stats.valid_rows == stats.rows - sum(stats.invalid_rows.values())
    assert 0.0 < stats.fill < 1.0
    latency = stats.latency_seconds
    assert 0.0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert len(stats.lanes) == len(halves.batch.lanes)


def test_rows_that_are_pending_are_received_and_sent_again(halves: Halves) -> None:
    halves.lose()
    halves.step_until(Status.PENDING)
    batch = halves.batch
    batch.send(np.full(4, 7))
    rows, result = batch.recv(4)
    assert rows.tolist() == [0, 1, 2, 3]
    assert result.status.tolist() == [Status.PENDING] * 2 + [Status.OK] * 2
    halves.gate.unlink()
    halves.step_until(Status.WORKER_DIED)
    assert halves.step().valid.all()


def test_a_batch_of_which_nothing_is_alive_takes_its_time(gate: Path) -> None:
    lanes = [gated_lane(index, gate) for index in range(2)]
    with BatchEnv(lanes) as batch:
        batch.reset()
        gate.touch()
        for lane in lanes:
            kill(lane._pool.worker_pids[0])
        zeros = np.zeros(4, np.int64)
        while not (batch.step(zeros).status == Status.PENDING).all():
            pass
        num_steps = 0
        opening = threading.Timer(0.5, gate.unlink)
        opening.start()
        while (batch.step(zeros).status == Status.PENDING).all():
            num_steps += 1
        opening.join()
        assert num_steps < 500
