"""An env that writes outside its memory costs episodes; the batch continues."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envserve.errors import EnvStartError
from envserve.lane import Call, Outcome, Reset
from envserve.slab import Rows, Status
from envserve.spaces import codec
from envserve.worker.channel import MessageKind

from .conftest import MakeBatch
from .fake_workers import PoolOfFakeWorkers
from .pool_driver import FAULTY, assert_lost, wait_for
from .test_lane_faults import actions_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux_only
def test_an_env_that_overwrites_all_rows_costs_one_transition(
    make_batch: MakeBatch,
) -> None:
    options = {"env_kwargs": {"fault": "overwrite"}}
    neighbour = make_batch.and_reset(FAULTY, 2, 1)
    batch = make_batch.and_reset(FAULTY, 4, 2, **options)
    batch.step(actions_of(batch))
    lost = batch.step(actions_of(batch, failing=0))
    assert lost.lost[:2].all()
    assert lost.status[:2].tolist() == [Status.WORKER_DIED] * 2
    assert not lost.reward[:2].any()
    text = lost.infos[0]["fault"]["text"]
    assert "an env probably writes outside its memory" in text
    again = batch.step(actions_of(batch))
    assert again.valid[:2].all()
    assert again.observation[:2, 0].tolist() == [1, 1]
    # The other worker may have finished its step before or after the fault.
    for result in (lost, again):
        for row in np.flatnonzero(result.valid[2:]) + 2:
            assert np.unique(result.observation[row]).size == 1
    assert neighbour.step(actions_of(neighbour)).valid.all()
    assert batch.step(actions_of(batch)).valid.all()


@linux_only
def test_an_env_that_overwrites_rows_at_every_step_is_an_error(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(FAULTY, 1, 1, env_kwargs={"fault": "overwrite"})

    def step_until_it_raises() -> None:
        for _ in range(100):
            assert not batch.step(actions_of(batch, failing=0)).valid.any()

    with pytest.raises(EnvStartError, match=r"times in a row.*writes outside"):
        step_until_it_raises()


@linux_only
def test_an_env_that_overwrites_rows_now_and_then_is_tolerated(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(FAULTY, 1, 1, env_kwargs={"fault": "overwrite"})
    for _ in range(10):
        assert batch.step(actions_of(batch, failing=0)).lost.all()
        assert batch.step(actions_of(batch)).valid.all()


Overwrite = Callable[[Rows], None]


def put(array: np.ndarray[Any, Any], value: int, at: int = 0) -> None:
    """Write one byte, which may be in the padding after an array."""
    memory = np.lib.stride_tricks.as_strided(array.view(np.uint8), (at + 1,), (1,))
    memory[at] = value


def put_in(name: str, value: int, *, in_padding: bool = False) -> Overwrite:
    """Return a function that writes a byte to row 0, or to the padding."""

    def overwrite(rows: Rows) -> None:
        array = getattr(rows, name)
        put(array, value, array.nbytes if in_padding else 0)

    return overwrite


#: Ways to overwrite rows of a pool with two rows; and the rows that are lost.
OVERWRITTEN: dict[str, tuple[Overwrite, list[int]]] = {
    "terminated is 255": (put_in("terminated", 255), [0]),
    "truncated is 2": (put_in("truncated", 2), [0]),
    "status is 255": (put_in("status", 255), [0]),
    "status is LATE": (put_in("status", Status.LATE), [0]),
    "both rows": (lambda rows: rows.truncated.view(np.uint8).fill(255), [0, 1]),
    **{
        f"padding after {name}": (put_in(name, 255, in_padding=True), [0, 1])
        for name in ("terminated", "truncated", "status")
    },
}


@pytest.fixture
def two_workers() -> Iterator[PoolOfFakeWorkers]:
    """Open a pool with two fake workers, which have one row each."""
    made = PoolOfFakeWorkers(num_workers=2, num_splits=1)
    for worker in made.launcher.workers:
        worker.become_ready()
    wait_for(made.pool, lambda: made.pool.is_ready)
    for worker in made.launcher.workers:
        assert worker.receive().kind is MessageKind.SLAB
    yield made
    made.close()


def finish(made: PoolOfFakeWorkers) -> dict[int, Outcome]:
    """Collect both blocks, while all workers reply to their messages."""
    finished: dict[int, Outcome] = {}
    give_up_at = time.monotonic() + 40.0
    while len(finished) < 2:
        assert time.monotonic() < give_up_at
        for outcome in made.pool.collect(0.02, 2 - len(finished)):
            assert outcome.block not in finished
            finished[outcome.block] = outcome
        for worker in made.launcher.workers:
            if not worker.is_ready:
                worker.become_ready()
                assert worker.receive().kind is MessageKind.SLAB
            channel = [worker.theirs] if worker.theirs.fileno() >= 0 else []
            if select.select(channel, [], [], 0)[0]:
                worker.reply()
    return finished


@pytest.mark.parametrize("has_replied", [False, True])
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_overwritten_rows_are_lost_and_then_valid(
    two_workers: PoolOfFakeWorkers, name: str, has_replied: bool
) -> None:
    pool, workers = two_workers.pool, two_workers.launcher.workers
    overwrite, lost = OVERWRITTEN[name]
    pool.submit_step([0, 1])
    if not has_replied:
        overwrite(pool.rows)
    for worker in workers[:2]:
        worker.reply()
    if has_replied:
        overwrite(pool.rows)
    for block, outcome in finish(two_workers).items():
        if block in lost:
            assert_lost(pool, outcome, "an env probably writes outside its memory")
        else:
            assert outcome == Outcome(block)
    assert len(workers) == 2 + len(lost)
    assert pool.metrics.num_env_steps == 2 - len(lost)
    # The loss costs one transition only.
    pool.rows.status[:] = Status.OK  # as a real worker does when it steps
    pool.submit_step([0, 1])
    assert finish(two_workers) == {0: Outcome(0), 1: Outcome(1)}
    assert len(workers) == 2 + len(lost)


@pytest.mark.parametrize("status", [*Status][1:])
def test_a_status_that_no_fault_explains_is_a_loss(
    two_workers: PoolOfFakeWorkers, status: Status
) -> None:
    pool = two_workers.pool
    pool.submit_step([0, 1])
    for worker in two_workers.launcher.workers:
        worker.reply()
    pool.rows.status[1] = status
    finished = finish(two_workers)
    assert finished[0] == Outcome(0)
    assert_lost(pool, finished[1], "worker 1 (env 1) was replaced")


def test_an_overwritten_reset_is_repeated_and_the_result_of_a_call_is_kept(
    two_workers: PoolOfFakeWorkers,
) -> None:
    pool, (first, second) = two_workers.pool, two_workers.launcher.workers
    pool.submit_reset([Reset(0)])
    pool.submit_call([Call(1, (1,), "get", "x")])
    first.reply()
    report: dict[str, Any] = {
        "faults": [],
        "infos": {},
        "rebuilt": [],
        "warnings": [],
        "columns": [],
    }
    no_report = codec.encode(report)
    values = codec.encode([7])
    second.reply(len(no_report).to_bytes(4, "little") + no_report + values)
    pool.rows.truncated.view(np.uint8).fill(255)
    finished = finish(two_workers)
    assert finished[0] == Outcome(0)
    assert finished[1].result == values
    pool.rows.status[:] = Status.OK  # as a real worker does when it resets its rows
    pool.submit_step([0, 1])
    finished = finish(two_workers)
    assert finished[0] == Outcome(0)
    assert_lost(pool, finished[1], "its rows were overwritten")


def test_rows_of_a_worker_that_has_died_are_not_checked(
    two_workers: PoolOfFakeWorkers,
) -> None:
    pool, (first, second) = two_workers.pool, two_workers.launcher.workers
    pool.submit_step([0, 1])
    put(pool.rows.status, 255)
    first.die(-11)
    second.reply()
    finished = finish(two_workers)
    assert_lost(pool, finished[0], "was killed by SIGSEGV")
    assert finished[1] == Outcome(1)
