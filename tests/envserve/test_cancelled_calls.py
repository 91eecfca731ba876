"""Calls that are cut short by a signal or a timeout, wherever they are just then."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import EnvTimeout
from envserve.testing import Ledger
from tests.envserve.ledger_player import LEDGER_OPENINGS, SEED
from tests.envserve.server_process import LEDGER, ServerProcess

NUM_ENVS = 8
NUM_TIMEOUTS = 500
#: Few: one that falls into the receiving of an answer costs a second.
NUM_CANCELLED = 20
#: About twice as long as a step takes.
MOST_SECONDS = 0.002


class Cancelled(Exception):
    """As a caller's own signal handler would raise it."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def cancel(*_: object) -> None:
        raise Cancelled

    before = signal.signal(signal.SIGALRM, cancel)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[BatchEnv]:
    kwargs = {"journal": str(tmp_path / "journal")}
    with (
        ServerProcess(tmp_path, *LEDGER_OPENINGS) as server,
        BatchEnv.connect(
            LEDGER,
            [server.address],
            NUM_ENVS,
            seed=SEED,
            num_splits=2,
            env_kwargs=kwargs,
        ) as batch,
    ):
        yield batch


def test_a_cancelled_step_never_answers_a_later_one(
    batch: BatchEnv, alarm: None, tmp_path: Path, random_generator: np.random.Generator
) -> None:
    ledger = Ledger(NUM_ENVS, SEED)
    ledger.reset(batch.reset())
    num_cancelled = 0
    while num_cancelled < NUM_CANCELLED:
        actions = random_generator.integers(0, 1000, NUM_ENVS)
        try:
            delay = random_generator.uniform(1e-6, MOST_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, delay)
            result = batch.step(actions)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Cancelled:
            num_cancelled += 1
            ledger.unanswered(actions)
            actions = random_generator.integers(0, 1000, NUM_ENVS)
            result = batch.step(actions)
        ledger.step(actions, result)
    batch.close()
    ledger.finish(tmp_path / "journal")
    assert ledger.num_valid == ledger.num_rows


def test_what_a_timeout_leaves_is_received_by_the_next_call(
    batch: BatchEnv, tmp_path: Path, random_generator: np.random.Generator
) -> None:
    ledger = Ledger(NUM_ENVS, SEED)
    ledger.reset(batch.reset())
    num_timeouts = 0
    while num_timeouts < NUM_TIMEOUTS:
        actions = random_generator.integers(0, 1000, NUM_ENVS)
        batch.send(actions)
        while batch.num_out:
            try:
                timeout = random_generator.uniform(0, MOST_SECONDS / 4)
                rows, result = batch.recv(batch.num_out, timeout)
            except EnvTimeout:
                num_timeouts += 1
            else:
                ledger.step(actions[rows], result, rows)
    batch.close()
    ledger.finish(tmp_path / "journal")
    assert ledger.num_valid == ledger.num_rows
    assert ledger.num_unseen == 0
