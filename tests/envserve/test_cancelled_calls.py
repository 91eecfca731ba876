"""Calls that a signal or a timeout interrupts at a random moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import EnvTimeout
from tests.envserve.server_process import LEDGER, LEDGER_OPTIONS, ServerProcess
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger

NUM_ENVS = 8
SEED = 3
NUM_TIMEOUTS = 500
#: Only a few, because an interrupt during bookkeeping costs episodes and env builds.
NUM_CANCELLED = 20
#: About twice as long as a step.
MOST_SECONDS = 0.002


class Cancelled(Exception):
    """Raised by the signal handler of the test."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def cancel(*_: object) -> None:
        raise Cancelled

    before = signal.signal(signal.SIGALRM, cancel)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def player(
    tmp_path: Path, random_generator: np.random.Generator
) -> Iterator[BatchDriver]:
    """A player whose ledger is finally compared with the actions that were applied."""
    kwargs = {"journal": str(tmp_path / "journal")}
    with ServerProcess(tmp_path, *LEDGER_OPTIONS) as server:
        with BatchEnv.connect(
            LEDGER,
            [server.address],
            NUM_ENVS,
            seed=SEED,
            num_splits=2,
            env_kwargs=kwargs,
        ) as batch:
            player = BatchDriver(batch, Ledger(NUM_ENVS, SEED), random_generator)
            yield player
        player.ledger.finish(tmp_path / "journal")


# Python ignores an exception that a signal handler raises while a frame is freed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_result_of_a_cancelled_step_is_never_returned_by_a_later_one(
    player: BatchDriver, alarm: None
) -> None:
    num_cancelled = 0
    while num_cancelled < NUM_CANCELLED:
        actions = player.draw()
        try:
            delay = player.random.uniform(1e-6, MOST_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, delay)
            result = player.batch.step(actions)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Cancelled:
            num_cancelled += 1
            player.ledger.mark_unanswered(actions)
            player.step()
        else:
            player.ledger.step(actions, result)
    num_valid = player.ledger.num_valid
    player.step()
    assert player.ledger.num_valid == num_valid + NUM_ENVS


def test_rows_that_timed_out_are_received_by_the_next_call(
    player: BatchDriver, tmp_path: Path
) -> None:
    num_timeouts = 0
    while num_timeouts < NUM_TIMEOUTS:
        player.send(np.arange(NUM_ENVS))
        while player.batch.num_in_flight:
            try:
                timeout = player.random.uniform(0, MOST_SECONDS / 4)
                player.receive(timeout, player.batch.num_in_flight)
            except EnvTimeout:
                num_timeouts += 1
    assert player.ledger.num_valid == player.ledger.num_rows
    player.batch.close()
    player.check_all_rows_were_valid(tmp_path / "journal")
