"""Interrupted pools and launchers."""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import LocalProtocolError
from envserve.lane import pop_harmless_mark
from envserve.pool.launcher import Launcher, WorkerProcess
from envserve.pool.pool import Pool
from envserve.slab import Status
from tests.leak_checks import running_processes

from .conftest import WaitUntil
from .interrupts import run_traced
from .pool_driver import LEDGER, PoolMaker, gather, kill, reset
from .test_launcher import RequestedWorker


def test_an_interrupt_while_waiting_costs_nothing(
    make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 2)
    for ways in range(2):  # wait for one outcome, then for both
        with monkeypatch.context() as patch:
            pool.submit_step([0, 1])
            patch.setattr(pool._workers.selector, "select", interrupt)
            last = pool._operations.likely_last
            if last is not None and last.process is not None:
                patch.setattr(last.process.channel, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                pool.collect(20.0, ways + 1)
            assert pop_harmless_mark(caught.value)
        assert not any(outcome.faults for outcome in gather(pool, [0, 1]))
    assert pool.stats()["restarts"] == 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# After an interrupt, the garbage collector may close a new socket.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("during", ["a step", "a loss"])
def test_an_interrupt_at_any_line_costs_an_episode_but_never_a_wrong_row(
    make_own_pool: PoolMaker, during: str
) -> None:
    """The interrupt may also hit the launcher."""

    def play(line: int) -> int:
        """Interrupt a step at a line; check later steps. Return the number of lines."""
        pool = make_own_pool(LEDGER, 2, 2)
        with BatchEnv([pool], padding_after=math.inf) as batch:
            batch.reset()
            if during == "a loss":
                kill(pool.worker_pids[0])
            num_lines = len(run_traced(lambda: batch.step([50, 50]), line))
            for action in (101, 102):
                result = batch.step([action, action])
                expected = np.where(result.valid, action, 0)
                np.testing.assert_array_equal(result.reward, expected)
            assert result.status.tolist() == [Status.OK] * 2
        return num_lines

    for line in np.linspace(1, play(-1), 20, dtype=int):
        play(int(line))


@pytest.mark.parametrize("during", ["_on_ready", "attach"])
def test_a_pool_that_is_interrupted_during_its_start_can_start_again(
    make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    before = num_slabs()
    pool = Pool(make_pool.config(LEDGER, 2, 2), launcher=make_pool.launcher)
    with monkeypatch.context() as patch:
        place = pool._operations if during == "_on_ready" else pool._workers.all[1]
        patch.setattr(place, during, interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.finish_start(time.monotonic() + 20.0)
    assert not pop_harmless_mark(caught.value)
    del caught  # its traceback keeps the slab alive
    pool.invalidate("a call was interrupted")
    pool.finish_start(time.monotonic() + 20.0)
    assert not any(outcome.faults for outcome in reset(pool))
    pool.close()
    assert num_slabs() == before
    with pytest.raises(LocalProtocolError):
        pool.submit_step([0])


def num_slabs() -> int:
    """Return the number of open slab descriptors; on Linux only."""
    if sys.platform != "linux":
        return 0
    files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("envserve-slab" in os.readlink(file) for file in files)


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_an_interrupted_poll_is_reported_as_the_end_of_all_workers() -> None:
    def play(line: int) -> int:
        """Interrupt the wait for a fork at a line; return the number of lines."""
        with contextlib.closing(Launcher()) as launcher:
            with contextlib.closing(RequestedWorker(launcher)) as worker:
                num_lines = len(run_traced(worker.wait_for_start, line))
                worker.wait_for(lambda: worker.pids or worker.exits)
                launcher.kill(worker.process)
                worker.wait_for_end()
                worker.assert_closed()
            with contextlib.closing(RequestedWorker(launcher)) as again:
                again.wait_for_start()
        return num_lines

    for line in np.linspace(1, play(-1), 15, dtype=int):
        play(int(line))


# The garbage collector closes the sockets of the new worker.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("line", [1, 2])
def test_no_report_is_expected_about_a_request_that_an_interrupt_prevented(
    line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(WorkerProcess):
        def __getattribute__(self, name: str) -> object:
            numbers.extend([name] * (name == "fork_number"))
            if len(numbers) == line:  # before the launcher sends or stores the request
                raise KeyboardInterrupt
            return super().__getattribute__(name)

    numbers: list[str] = []
    clock, extra_seconds = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + extra_seconds)
    with (
        contextlib.closing(Launcher()) as launcher,
        contextlib.closing(RequestedWorker(launcher)) as worker,
    ):
        worker.wait_for_start()
        monkeypatch.setattr("envserve.pool.launcher.WorkerProcess", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            launcher.launch()
        extra_seconds = 121.0
        launcher.poll()
        assert worker.exits == []


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_an_interrupted_start_of_the_template_leaves_no_process(
    wait_until: WaitUntil,
) -> None:
    def start() -> None:
        try:
            stack.enter_context(contextlib.closing(Launcher()))
        except KeyboardInterrupt as error:
            interrupts.append(error)  # its traceback keeps the launcher alive
            raise

    before, interrupts = running_processes().keys(), list[KeyboardInterrupt]()
    with contextlib.ExitStack() as stack:
        places = run_traced(start, -1, subprocess.__file__.__eq__)
    lines = [linecache.getline(*place) for place in places]
    started = next(n for n, line in enumerate(lines) if "_child_created = True" in line)
    run_traced(start, started + 2, subprocess.__file__.__eq__)
    wait_until(lambda: running_processes().keys() <= before, 120.0)
    assert interrupts.pop()
