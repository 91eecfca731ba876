"""After a KeyboardInterrupt at any line, no later call returns the old result."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.errors import LocalProtocolError
from envserve.pool.launcher import Launcher

from .conftest import MakeBatch
from .interrupts import run_traced
from .pool_driver import LEDGER

NUM_POINTS = 12


@pytest.fixture
def launcher(own_launcher: Launcher) -> Launcher:
    return own_launcher  # interrupts would affect a shared launcher


def points(num_lines: int) -> list[int]:
    """Return the lines to interrupt at: evenly spread ones, and the last two."""
    assert num_lines > NUM_POINTS
    spread = np.linspace(1, num_lines - 2, NUM_POINTS - 2, dtype=int).tolist()
    return [*spread, num_lines - 1, num_lines]


def options_of(lane_kind: str) -> dict[str, Any]:
    # A worker that received an incomplete message is killed at the step timeout.
    timeout = {"step_timeout": 2.0} if lane_kind == "local" else {}
    return {"env_kwargs": {"length": 1000}, **timeout}


def step_traced(batch: BatchEnv, action: int, line: int) -> int:
    call = partial(batch.step, np.full(batch.num_envs, action))
    return len(run_traced(call, line))


def test_the_result_of_an_interrupted_step_is_never_returned_by_a_later_one(
    make_batch: MakeBatch, lane_kind: str
) -> None:
    options = options_of(lane_kind)
    with make_batch(LEDGER, 4, 2, **options) as probe:
        probe.reset()
        num_lines = step_traced(probe, 1, -1)
    for line in points(num_lines):
        with make_batch(LEDGER, 4, 2, **options) as batch:
            batch.reset()
            step_traced(batch, 50, line)
            for action in (101, 102):
                result = batch.step(np.full(4, action))
                expected = np.where(result.valid, action, 0)
                np.testing.assert_array_equal(result.reward, expected)
            assert result.valid.all()


def receive_all(batch: BatchEnv, action: int) -> int:
    """Receive until no row is in flight; return the number of lost results.

    Every other result must be that of `action` or of a lost episode.
    """
    num_lost = 0
    while num_in_flight := batch.num_in_flight:
        try:
            rows, result = batch.recv()
        except LocalProtocolError:  # the interrupt has discarded the results
            assert batch.num_in_flight < num_in_flight
            num_lost += num_in_flight - batch.num_in_flight
        else:
            assert batch.num_in_flight == num_in_flight - len(rows)
            expected = np.where(result.valid, action, 0)
            np.testing.assert_array_equal(result.reward, expected)
    return num_lost


@pytest.mark.parametrize("interrupted", ["send", "recv"])
def test_an_interrupted_send_or_recv_neither_mixes_nor_loses_rows(
    make_batch: MakeBatch, lane_kind: str, interrupted: str
) -> None:
    def run(line: int) -> int:
        with make_batch(LEDGER, 4, 2, num_splits=2, **options_of(lane_kind)) as batch:
            batch.reset()
            batch.step(np.full(4, 9))
            if interrupted == "send":
                places = run_traced(lambda: batch.send(np.full(4, 50)), line)
            else:
                batch.send(np.full(4, 50))
                places = run_traced(lambda: batch.recv(4), line)
            receive_all(batch, 50)
            for action in (101, 102):
                batch.send(np.full(4, action))
                assert receive_all(batch, action) == 0
            result = batch.step(np.full(4, 103))
            assert result.valid.all()
            np.testing.assert_array_equal(result.reward, 103)
            return len(places)

    for line in points(run(-1)):
        run(line)


def wait_until_finished(batch: BatchEnv) -> None:
    """Wait until all steps have ended, so that `recv` does not block."""
    observation = np.zeros((batch.num_envs, 4))
    numbers = np.zeros(batch.num_envs)
    observation.flags.writeable = numbers.flags.writeable = False
    flags = [numbers] * 4
    out = StepResult._make([observation, *flags, observation, numbers, {}])
    everything = np.arange(batch.num_envs)
    with pytest.raises(ValueError, match="read-only"):  # raised once it is written
        batch.recv(env_indices=everything, out=out)


# After an interrupt, the garbage collector may close a new socket.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_rows_can_be_received_again_if_recv_is_interrupted_while_returning(
    make_batch: MakeBatch,
) -> None:
    with make_batch(LEDGER, 4, 2, num_splits=2) as batch:
        batch.reset()
        batch.send(np.arange(4))
        wait_until_finished(batch)
        num_lines = len(run_traced(lambda: batch.recv(4), -1))
        assert batch.num_in_flight == 0
        batch.send(np.arange(4))
        wait_until_finished(batch)
        for line in range(1, num_lines + 1):
            run_traced(lambda: batch.recv(4), line)
            assert batch.num_in_flight == 4
        rows, result = batch.recv(4)
        assert rows.tolist() == [0, 1, 2, 3]
        assert result.reward.tolist() == np.where(result.valid, rows, 0).tolist()
        batch.send(np.full(4, 7))
        _, result = batch.recv(4)
        assert result.reward.tolist() == [7] * 4
