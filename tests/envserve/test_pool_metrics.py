"""A pool's counters are exact, and cost almost nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import FrameType

import numpy as np
import pytest

from envserve.lane import Reset
from envserve.pool.pool import Pool
from envserve.pool.pool_metrics import status_fields, sum_counts
from envserve.slab import Status
from envserve.wire.status import LeaseStatus, ServerStatus
from envserve.worker.step_timings import BOUNDS

from .pool_driver import SCRIPT, PoolMaker, kill, reset, step

RAISES = "if action == 1: raise ValueError('planted')"


def lease_status(pool: Pool) -> LeaseStatus:
    return pool.status(256, number=1)


def totals(pool: Pool) -> ServerStatus:
    return ServerStatus(**status_fields(sum_counts([pool.metrics.counts])))


def test_steps_rows_and_faults_are_counted(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 4, 2, env_kwargs={"step": RAISES})
    expected: Counter[str] = Counter()
    random = np.random.default_rng(5)
    num_raised = 0
    for turn in range(30):
        # An env that raised twice in a row would cost its worker.
        actions = random.integers(0, 2, 4) * (turn % 2 == 0)
        num_killed = 0
        if turn in (10, 20):
            kill(pool.worker_pids[turn // 20])
            num_killed = 2
        step(pool, actions)
        found = Counter(Status(status).name for status in pool.rows.status)
        assert found["WORKER_DIED"] == num_killed
        num_raised += found["ENV_ERROR"]
        expected += found
    status, whole = lease_status(pool), totals(pool)
    assert status.rows == dict(expected)
    assert status.steps == expected["OK"]
    assert status.faults == {"ENV_ERROR": num_raised, "WORKER_DIED": 2}
    assert status.restarts == pool.stats()["restarts"] == 2
    assert (whole.rows, whole.faults) == (status.rows, status.faults)
    # A batch is a block of two rows; two of the steps were lost with their worker.
    assert status.batch_seconds.count == 60 - 2
    assert whole.env_step_seconds.count == expected["OK"] + expected["ENV_ERROR"]
    # Here each step ends an episode, and each lost row begins one.
    assert whole.resets == 4 + sum(expected.values())
    assert 0 < status.env_seconds == whole.env_step_seconds.sum
    assert status.batch_seconds.bounds == BOUNDS


def test_an_env_that_hangs_is_one_fault_and_costs_a_row_of_each_env(
    make_pool: PoolMaker,
) -> None:
    hangs = {"step": "if action == 1: time.sleep(3600)"}
    timeouts = dict.fromkeys(["step_timeout_seconds", "reset_timeout_seconds"], 3.0)
    pool = make_pool.and_reset(SCRIPT, 3, 1, env_kwargs=hangs, **timeouts)
    step(pool, [0, 1, 0])
    step(pool, 0)
    status = lease_status(pool)
    assert (status.rows, status.faults) == ({"OK": 3, "TIMEOUT": 3}, {"TIMEOUT": 1})


def test_recoveries_are_reported_with_their_durations(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 4, 2)
    kill(pool.worker_pids[1])
    began = time.monotonic()
    step(pool, 0)
    most = 1000 * (time.monotonic() - began) + 1
    status = lease_status(pool)
    assert [(serial, row) for serial, row, _ in status.recoveries] == [(1, 2), (2, 3)]
    assert all(0 <= milliseconds <= most for _, _, milliseconds in status.recoveries)
    assert status.num_recoveries == 2


def test_rows_of_a_worker_that_is_being_replaced_are_absent(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(SCRIPT, 4, 2)
    assert lease_status(pool).absent == ()
    pool.submit_step([0])
    assert lease_status(pool).in_flight == 2
    while not pool.collect(1.0):
        pass
    kill(pool.worker_pids[0])
    while not lease_status(pool).absent:
        pool.collect(0.05)
    assert lease_status(pool).absent == (0, 1)
    step(pool, 0)
    assert (lease_status(pool).absent, lease_status(pool).in_flight) == ((), 0)


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_whole_episodes_are_reported_while_they_are_watched(
    make_pool: PoolMaker, autoreset: str
) -> None:
    pool = make_pool.and_reset("CartPole-v1", 4, 2, autoreset=autoreset)
    expected: list[tuple[int, float, int]] = []
    begun: list[tuple[float, int] | None] = [None] * 4
    is_over = [False] * 4
    random = np.random.default_rng(3)

    def play(num_steps: int) -> None:
        for _ in range(num_steps):
            step(pool, random.integers(0, 2, 4))
            rows = pool.rows
            for row in range(4):
                was_over = is_over[row]
                is_over[row] = bool(rows.terminated[row] | rows.truncated[row])
                if was_over and autoreset == "next_step":
                    continue  # this step was the reset
                if (running := begun[row]) is not None:
                    total, length = running
                    begun[row] = total + float(rows.reward[row]), length + 1
                    if is_over[row] and rows.status[row] == Status.OK:
                        expected.append(
                            (row, total + float(rows.reward[row]), length + 1)
                        )
                if is_over[row]:
                    begun[row] = (0.0, 0)
            if autoreset == "disabled" and any(is_over):
                ended = [row for row in range(4) if is_over[row]]
                by_block = {b: [r for r in ended if r // 2 == b] for b in range(2)}
                reset(pool, *(Reset(b, tuple(r)) for b, r in by_block.items() if r))

    play(30)
    assert lease_status(pool).num_episodes == 0
    begun = [None] * 4  # the current episodes began before tracking
    pool.metrics.start_tracking(time.monotonic() + 60.0)  # long enough for any machine
    play(60)
    kill(pool.worker_pids[0])
    play(60)
    status = lease_status(pool)
    assert status.num_episodes == len(expected) > 10
    assert sorted(episode[1:] for episode in status.episodes) == sorted(expected)
    assert [episode[0] for episode in status.episodes] == [*range(1, len(expected) + 1)]
    pool.metrics.start_tracking(time.monotonic() - 11.0)
    play(1)
    assert not pool.metrics.is_tracking


def test_an_unwatched_step_makes_no_call_for_its_metrics(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 4, 2)
    called: set[str] = set()

    def record_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    sys.setprofile(record_call)
    try:
        step(pool, 0)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("operations.py") for name in called)
    assert not any(
        name.endswith(("pool_metrics.py", "step_timings.py")) for name in called
    )
    assert lease_status(pool).steps == 4


def test_a_watched_step_makes_one_call_per_block(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 4, 2)
    pool.metrics.start_tracking(time.monotonic() + 60.0)  # long enough for any machine
    called: list[str] = []

    def record_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("pool_metrics.py"):
            called.append(frame.f_code.co_name)

    sys.setprofile(record_call)
    try:
        for _ in range(20):
            step(pool, 1)
    finally:
        sys.setprofile(None)
    assert lease_status(pool).num_episodes > 0
    assert called == ["update_episodes"] * 40


def test_resets_of_spare_envs_are_counted_too(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 2, 1, spare_envs=True)
    for _ in range(10):
        step(pool, 0)
    # Each row has a first reset, one per step, and possibly one in progress.
    assert 2 * 10 <= totals(pool).resets <= 2 * 12


def test_corrupt_counters_of_many_leases_still_fit_into_a_status() -> None:
    cells = np.full(len(sum_counts(())), 2**62)
    total = sum_counts(())
    for _ in range(1000):
        total = sum_counts([total, cells])
    body = ServerStatus(**status_fields(total)).encode()
    assert ServerStatus.decode(body).resets > 0
