"""Stepping some envs while others are in flight, on local and remote lanes."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult, outcome_queue
from envserve.client.link.remote_lane import RemoteLane
from envserve.errors import (
    ActionError,
    EnvError,
    EnvTimeout,
    LocalProtocolError,
    ServerLost,
)
from envserve.lane import Lane, Outcome
from envserve.pool.pool import Pool
from envserve.settings import PoolSettings
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger
from tests.oracle.probe_envs import MODULE
from tests.simulation.fake_lane import FakeLane, Faults

from .conftest import MakeBatch
from .pool_driver import FAULTY, LEDGER, SEED
from .server_process import make_config

Array = np.ndarray[Any, Any]


def test_every_result_belongs_to_its_own_request(
    make_batch: MakeBatch, random_generator: np.random.Generator
) -> None:
    batch = make_batch(LEDGER, 8, 4, seed=0, num_splits=2, env_kwargs={"length": 7})
    player = BatchDriver(batch, Ledger(8, 0, length=7), random_generator)
    idle = list(batch.blocks)
    received = np.zeros(8, int)
    for _ in range(200):
        chosen = [block for block in idle if random_generator.random() < 0.7]
        idle = [block for block in idle if all(block is not c for c in chosen)]
        for block in chosen:
            player.send(block)
        assert batch.num_in_flight == 8 - sum(map(len, idle))
        assert batch.is_waiting == (batch.num_in_flight > 0)
        if batch.num_in_flight:
            min_envs = int(random_generator.integers(1, batch.num_in_flight + 1))
            rows, _ = player.receive(min_envs=min_envs)
            received[rows] += 1
            idle += [block for block in batch.blocks if np.isin(block, rows).all()]
    player.receive_rest()
    assert player.ledger.num_valid == player.ledger.num_rows
    assert received.min() > 20


class QuietLane(FakeLane):
    """A lane whose steps do not finish, and whose descriptor is never readable."""

    num_collects = 0

    def __init__(self) -> None:
        super().__init__(1, 1, Faults(end=1.0))
        os.read(self.fileno(), 1)

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        self.num_collects += 1
        return super().collect(timeout_seconds, min_finished)


def test_recv_reads_only_from_lanes_whose_descriptor_is_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet, lane = QuietLane(), FakeLane(1, 1, Faults(end=1.0))
    with BatchEnv([quiet, lane]) as batch:
        batch.reset()
        quiet.faults.end = 0.0
        batch.send([1, 1])
        monkeypatch.setattr(outcome_queue, "POLL_SECONDS", math.inf)
        counts = []
        for _ in range(20):
            rows, _ = batch.recv()
            assert rows.tolist() == [1]
            counts.append(quiet.num_collects)
            batch.send([1], rows)
        assert len({*counts}) == 1  # only the first call polls all lanes


def test_lanes_are_polled_although_their_descriptors_are_not_readable() -> None:
    quiet, lane = QuietLane(), FakeLane(1, 1, Faults(end=1.0))
    with BatchEnv([quiet, lane]) as batch:
        batch.reset()
        received = np.zeros(2, np.int64)
        batch.send([1, 1])
        while received[0] < 3:
            rows, _ = batch.recv()
            received[rows] += 1
            batch.send(np.ones(len(rows), np.int64), rows)
        assert received[1] >= received[0]


class SleepingLane(FakeLane):
    """A lane that waits until the timeout if its operations do not finish."""

    waited = 0.0

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        if not self.faults.end:
            self.waited += timeout_seconds
            time.sleep(timeout_seconds)
        return super().collect(timeout_seconds, min_finished)


def test_the_lanes_of_a_batch_share_one_timeout() -> None:
    lanes = [SleepingLane(1, 1, Faults(end=1.0)) for _ in range(3)]
    with BatchEnv(lanes) as batch:
        batch.reset()
        for lane in lanes:
            lane.faults.end = 0.0
        batch.send([1] * 3)
        with pytest.raises(EnvTimeout):
            batch.recv(3, timeout=0.2)
        assert sum(lane.waited for lane in lanes) <= 0.2


def test_rows_of_a_lost_server_can_be_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = FakeLane(2, 2, Faults(end=1.0))

    def fail(block: int) -> Outcome:
        return FakeLane.finish(lane, block)._replace(error=ServerLost("no reply"))

    with BatchEnv([lane]) as batch:
        batch.reset()
        with monkeypatch.context() as patch:
            patch.setattr(lane, "finish", fail)
            batch.send([1, 1])
            with pytest.raises(ServerLost):
                batch.recv(2)
        batch.drain()
        assert batch.num_in_flight == 0
        with pytest.raises(LocalProtocolError, match="reset"):
            batch.send([1, 1])
        batch.reset()
        assert batch.step([2, 2]).valid.all()


def test_a_drain_by_another_thread_changes_nothing() -> None:
    class DrainedLane(FakeLane):
        def collect(
            self, timeout_seconds: float, min_finished: int = 1
        ) -> list[Outcome]:
            with pytest.raises(LocalProtocolError, match="another thread is using"):
                other.submit(batch.drain).result()
            return super().collect(timeout_seconds, min_finished)

    lane = DrainedLane(2, 2, Faults(end=1.0))
    with ThreadPoolExecutor(1) as other, BatchEnv([lane]) as batch:
        batch.reset()
        for _ in range(2):
            assert batch.step([1, 1]).valid.all()


def test_a_slow_env_does_not_delay_other_blocks() -> None:
    slow = {"length": 1, "reset_seconds": 0.4}
    lanes = [local_lane(31, 0, {"length": 1000}, 31), local_lane(1, 31, slow, 1)]
    with BatchEnv(lanes) as batch:
        batch.reset()
        actions = np.arange(32)
        received = np.zeros(32, int)
        batch.send(actions)
        while received[:31].min() < 40 or received[31] < 2:
            rows, result = batch.recv()
            assert result.valid.all()
            np.testing.assert_array_equal(result.reward, actions[rows])
            received[rows] += 1
            actions[rows] = (actions[rows] + 1) % 1000
            batch.send(actions[rows], rows)
        assert received[31] < received[:31].min()
        batch.recv(32)


def test_a_slow_block_delays_only_its_own_rows(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(FAULTY, 2, 2, env_kwargs={"fault": "hang"})
    batch.send(np.array([0, 1]))  # the second step never finishes
    for _ in range(3):
        rows, _ = batch.recv(timeout=20)
        assert rows.tolist() == [0]
        batch.send(np.array([0]), rows)
    with pytest.raises(EnvTimeout, match="only 1 of 2 rows"):
        batch.recv(2, timeout=0.05)


def test_rows_sent_together_are_the_same_as_those_sent_separately(
    make_batch: MakeBatch, random_generator: np.random.Generator
) -> None:
    batch = make_batch(LEDGER, 4, 2, seed=0)
    player = BatchDriver(batch, Ledger(4, 0), random_generator)
    for together in (True, False, True):
        player.send(np.arange(4), together=together)
        rows, result = player.receive(min_envs=4)
        assert rows.tolist() == [0, 1, 2, 3]
        assert result.valid.all()


def config(
    num_envs: int, first: int, env_kwargs: dict[str, Any], num_workers: int = 2
) -> PoolSettings:
    return make_config(
        LEDGER,
        num_envs,
        num_workers=num_workers,
        num_splits=2,
        first_env_index=first,
        seed=SEED,
        env_kwargs=env_kwargs,
        import_modules=(MODULE,),
    )


def local_lane(*arguments: Any) -> Pool:
    lane = Pool(config(*arguments))
    lane.finish_start(time.monotonic() + 60)
    return lane


def test_local_and_remote_rows_are_waited_for_together(
    tcp_address: str, random_generator: np.random.Generator
) -> None:
    remote = RemoteLane(tcp_address, config(4, 3, {"length": 5}))
    remote.finish_start(time.monotonic() + 60)
    lanes: list[Lane] = [local_lane(3, 0, {"length": 5}), remote]
    lanes.append(local_lane(2, 7, {"length": 5}))
    with BatchEnv(lanes) as batch:
        assert [split.tolist() for split in batch.splits] == [
            [0, 3, 4, 7],
            [1, 2, 5, 6, 8],
        ]
        player = BatchDriver(batch, Ledger(9, SEED, length=5), random_generator)
        for split in batch.splits:
            player.send(split)
        received = set()
        for step in range(150):
            rows, _ = player.receive(min_envs=1 + step % 3)
            received |= {*rows.tolist()}
            player.send(rows)
        assert received == {*range(9)}
        for split in batch.splits[::-1]:
            rows, _ = player.receive(env_indices=split)
            assert rows.tolist() == split.tolist()
        player.step()
        assert player.ledger.num_valid == player.ledger.num_rows


def half_of(result: StepResult, rows: Array) -> StepResult:
    return StepResult(
        result.observation[rows],
        result.reward[rows],
        result.terminated[rows],
        result.truncated[rows],
        result.valid[rows],
        result.final_observation[rows],
        result.status[rows],
        {},
    )


def test_a_split_is_received_while_the_other_is_in_flight(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 8, 2, num_splits=2)
    assert [split.tolist() for split in batch.splits] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    observation = batch.reset()
    first, second = batch.splits
    whole = batch.step(np.zeros(8, np.int64))
    halves = [half_of(whole, rows) for rows in batch.splits]
    batch.send(np.arange(4), first)
    for step in range(5):
        batch.send(np.arange(4, 8) + step, second)
        rows, result = batch.recv(env_indices=first, out=halves[0])
        assert result.reward is halves[0].reward
        assert rows.tolist() == first.tolist()
        assert result.reward.tolist() == [step, 1 + step, 2 + step, 3 + step]
        batch.send(np.arange(4) + step + 1, first)
        rows, result = batch.recv(env_indices=second, out=halves[1])
        assert result.reward.tolist() == [4 + step, 5 + step, 6 + step, 7 + step]
        assert result.observation[:, 0].tolist() == observation[4:, 0].tolist()


def test_actions_follow_the_order_of_their_rows(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 4, 2)
    batch.send(np.array([30, 10, 0, 20]), [3, 1, 0, 2])
    rows, result = batch.recv(4)
    assert rows.tolist() == [0, 1, 2, 3]
    assert result.reward.tolist() == [0, 10, 20, 30]
    with pytest.raises(ActionError, match=r"Env 1: .* got 1000"):
        batch.send(np.array([30, 1000, 0, 20]), [3, 1, 0, 2])
    assert batch.num_in_flight == 0


def test_only_whole_blocks_can_be_sent(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 8, 2, num_splits=2)
    with pytest.raises(IndexError, match=r"row 3 .* of rows 2 to 3 is missing"):
        batch.send(np.zeros(3, np.int64), [0, 1, 2])
    with pytest.raises(IndexError, match="distinct env indices"):
        batch.send(np.zeros(3, np.int64), [0, 1, 1])
    with pytest.raises(IndexError, match=r"\[0, 8\); got \[8\]"):
        batch.send(np.zeros(1, np.int64), [8])
    with pytest.raises(IndexError, match="at least one row"):
        batch.send(np.zeros(0, np.int64), [])
    with pytest.raises(ActionError, match=r"expected shape \[2\]"):
        batch.send(np.zeros(4, np.int64), [0, 1])
    assert batch.num_in_flight == 0


def test_rows_in_flight_must_be_received_first(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 4, 2, num_splits=2)
    with pytest.raises(LocalProtocolError, match=r"reset\(\)"):
        batch.send(np.zeros(4, np.int64))
    batch.reset()
    with pytest.raises(LocalProtocolError, match="no rows are in flight"):
        batch.recv()
    batch.send(np.array([1, 2]), [0, 1])
    for act in (
        lambda: batch.step(np.zeros(4, np.int64)),
        lambda: batch.send(np.zeros(4, np.int64)),
        lambda: batch.reset(),
        lambda: batch.reset([1, 3]),
        lambda: batch.call(0, "echo"),
    ):
        with pytest.raises(LocalProtocolError, match=r"recv\(\) them first"):
            act()
    for few in (3, 0):
        with pytest.raises(
            LocalProtocolError, match="expected 1 to 2, the number of rows"
        ):
            batch.recv(few)
    with pytest.raises(LocalProtocolError, match=r"the rows \[2, 3\] are not"):
        batch.recv(env_indices=[2, 3])
    assert batch.reset([3])[:, 1].tolist() == [1]
    assert batch.call(2, "echo", 5) == [5]
    rows, result = batch.recv(2)
    assert rows.tolist() == [0, 1]
    assert result.reward.tolist() == [1.0, 2.0]
    assert batch.step(np.arange(4)).reward.tolist() == [0, 1, 2, 3]


def test_a_timeout_loses_nothing(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(
        LEDGER, 2, 1, num_splits=2, env_kwargs={"length": 2, "reset_seconds": 1.0}
    )
    batch.send(np.array([1]), [0])
    batch.recv()
    batch.send(np.array([5, 6]))
    with pytest.raises(
        EnvTimeout, match=r"only 0 of 2 rows have finished within 0\.0 s"
    ):
        batch.recv(2, timeout=0.0)
    rows, result = batch.recv(2)
    assert rows.tolist() == [0, 1]
    assert result.reward.tolist() == [5.0, 6.0]
    assert result.terminated.tolist() == [True, False]


def test_ended_envs_can_be_reset_while_others_are_in_flight(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(
        LEDGER, 2, 1, num_splits=2, env_kwargs={"length": 2}, autoreset="disabled"
    )
    batch.step(np.zeros(2, np.int64))
    batch.send(np.array([1, 2]))
    _, result = batch.recv(env_indices=[0])
    assert result.terminated.tolist() == [True]
    with pytest.raises(LocalProtocolError, match=r"\[0\] have ended"):
        batch.send(np.array([3]), [0])
    assert batch.reset([0])[:, 1:3].tolist() == [[1, 0]]
    batch.send(np.array([3]), [0])
    _, result = batch.recv(2)
    assert result.reward.tolist() == [3.0, 2.0]
    assert result.terminated.tolist() == [False, True]
    with pytest.raises(LocalProtocolError, match=r"\[1\] have ended"):
        batch.step(np.zeros(2, np.int64))


def test_the_row_of_a_failed_env_is_invalid(make_batch: MakeBatch) -> None:
    batch = make_batch(FAULTY, 2, 1, num_splits=2, env_kwargs={"fault": "kill"})
    batch.reset()
    batch.send(np.array([1]), [1])
    rows, result = batch.recv()
    assert rows.tolist() == [1]
    assert result.valid.tolist() == [False]
    assert result.truncated.tolist() == [True]
    assert result.infos[1]["fault"]["status"] == "WORKER_DIED"
    batch.send(np.zeros(2, np.int64))
    # The worker held both rows.
    assert batch.recv(2)[1].valid.tolist() == [False, True]
    assert batch.step(np.zeros(2, np.int64)).valid.all()


def test_an_error_names_its_env_and_leaves_other_blocks_in_flight(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(FAULTY, 8, 2, num_splits=2, env_kwargs={"fault": "nan"})
    batch.reset()
    batch.send(np.array([0, 0, 0, 1, 0, 0, 0, 0]))
    with pytest.raises(EnvError, match=r"Env 3 .* to be finite; got nan"):
        batch.recv(8)
    assert batch.num_in_flight == 6
    rows, result = batch.recv(6)
    assert rows.tolist() == [0, 1, 4, 5, 6, 7]
    assert result.valid.all()
    batch.send(np.zeros(2, np.int64), [2, 3])
    assert batch.recv()[1].valid.all()


def test_a_wrong_out_leaves_the_rows_in_flight(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 2)
    out = batch.step(np.zeros(2, np.int64))
    batch.send(np.array([5, 6]))
    with pytest.raises(ValueError, match="expected arrays of 2 rows; got 3"):
        batch.recv(env_indices=[0, 1], out=out._replace(reward=np.zeros(3)))
    with pytest.raises(ValueError, match=r"shape \[2, 4\]; got \[1, 4\]"):
        batch.recv(env_indices=[0, 1], out=out._replace(observation=np.zeros((1, 4))))
    with pytest.raises(ValueError, match="expected arrays of 1 rows; got 2"):
        batch.recv(env_indices=[1], out=out)
    with pytest.raises(ValueError, match="requires env_indices"):
        batch.recv(2, out=out)
    assert batch.recv(2)[1].reward.tolist() == [5, 6]


def test_a_wrong_out_steps_no_env(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 2)
    out = batch.step(np.array([3, 4]))
    with pytest.raises(ValueError, match=r"shape \[2, 4\]; got \[1, 4\]"):
        batch.step(np.array([5, 6]), out._replace(final_observation=np.zeros((1, 4))))
    assert batch.step(np.array([5, 6]), out).observation[:, 2].tolist() == [2, 2]


def test_rows_are_selected_by_index(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 2)
    for wrong in (np.array([True, False]), np.array([0.5, 1.5])):
        with pytest.raises(IndexError, match=r"integer env indices; got (bool|fl)"):
            batch.send(np.zeros(2, np.int64), wrong)
        with pytest.raises(IndexError, match=r"integer env indices; got (bool|fl)"):
            batch.reset(wrong)
