"""Pools and launchers that are interrupted."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from envserve.errors import LocalProtocolError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.slab import Status

from .interrupts import run_traced
from .pool_driver import (
    LEDGER,
    PoolMaker,
    gather,
    kill,
    reset,
    step,
)
from .test_launcher import Started


def test_an_interrupt_while_it_waits_costs_nothing(
    make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(LEDGER, 2, 2)
    reset(pool)
    for ways in range(2):  # until one is done, or both
        with monkeypatch.context() as patch:
            pool.submit_step([0, 1])
            patch.setattr(pool._workers._selector, "select", interrupt)
            if pool._workers.likely_last is not None:
                patch.setattr(pool._workers.likely_last.process, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.collect(20.0, ways + 1)
            assert pool.is_waiting
        assert not any(outcome.faults for outcome in gather(pool, [0, 1]))
    assert pool.stats()["restarts"] == 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# A socket that is not anybody's yet is closed with the frame that has made it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("during", ["a step", "a loss"])
def test_an_interrupt_at_any_line_costs_an_episode_but_never_a_wrong_row(
    make_pool: PoolMaker, during: str
) -> None:
    def play(line: int) -> int:
        """Interrupts a step there, and checks the next ones; returns the lines."""
        pool = make_pool(LEDGER, 2, 2, own)
        reset(pool)
        if during == "a loss":
            kill(pool.worker_pids[0])
        num_lines = len(run_traced(lambda: step(pool, 50), line))
        if num_lines == line and not pool.is_waiting:
            pool.lose("a call was interrupted")
        while pool.is_busy:  # as far as it is in flight still
            pool.collect(20.0)
        for action in (101, 102):
            step(pool, action)
            expected = np.where(pool.rows.status == Status.OK, action, 0)
            np.testing.assert_array_equal(pool.rows.reward, expected)
        assert pool.rows.status.tolist() == [Status.OK] * 2
        pool.close()
        return num_lines

    # It may be interrupted, too.
    with contextlib.closing(Launcher(make_pool.launcher._import_modules)) as own:
        num_lines = play(-1)
        for line in np.linspace(1, num_lines, 20, dtype=int):
            play(int(line))


def test_a_pool_that_is_interrupted_as_it_starts_starts_anew(
    make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(make_pool.config(LEDGER, 2, 2), launcher=make_pool.launcher)
    with monkeypatch.context() as patch:
        patch.setattr(pool._operations, "_on_ready", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.finish_start(time.monotonic() + 20.0)
    assert not pool.is_waiting
    pool.lose("a call was interrupted")
    pool.finish_start(time.monotonic() + 20.0)
    assert not any(outcome.faults for outcome in reset(pool))
    pool.close()
    with pytest.raises(LocalProtocolError):
        pool.submit_step([0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_poll_is_reported_as_the_end_of_all_workers() -> None:
    launcher = Launcher()
    worker = Started(launcher)
    num_lines = len(run_traced(lambda: worker.wait_for(lambda: worker.pids), -1))
    worker.socket.close()
    launcher.close()
    for line in np.linspace(1, num_lines, 15, dtype=int):
        launcher = Launcher()
        worker = Started(launcher)
        run_traced(lambda: worker.wait_for(lambda: worker.pids), int(line))  # noqa: B023
        worker.wait_for(lambda: worker.pids or worker.exits)  # noqa: B023
        launcher.kill(worker.forked)
        worker.wait_for(lambda: worker.exits)  # noqa: B023
        worker.socket.settimeout(2.0)
        assert worker.socket.recv(1) == b""
        worker.socket.close()
        again = Started(launcher)
        again.wait_for(lambda: again.pids)  # noqa: B023
        again.socket.close()
        launcher.close()
