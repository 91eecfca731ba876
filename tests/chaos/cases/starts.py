"""Envs that are slow to reset, which is no fault; and some that never start."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

import numpy as np

from envserve.errors import EnvStartError
from envserve.pool.pool import Pool
from tests.chaos.batches import EPISODE, local_driver
from tests.chaos.driver import Driver
from tests.chaos.envs import read_starts
from tests.chaos.recoveries import Array
from tests.chaos.trial import ChaosCase, Trial

_STEP_TIMEOUT: Final = 0.5
_RESET_SECONDS: Final = 5.0
_NUM_WORKERS: Final = 4


def _slow(trial: Trial) -> None:
    num_resets = trial.count(10_000)
    num_envs = 64 if trial.scale >= 0.1 else 16
    most = trial.seconds(_RESET_SECONDS, least=0.2)
    kwargs = {"most_reset_seconds": most, "length": EPISODE}
    with local_driver(
        trial, num_envs, num_envs, env_kwargs=kwargs, step_timeout=_STEP_TIMEOUT
    ) as driver:
        driver.send(np.arange(num_envs))
        while trial.result.faults < num_resets:
            rows, result = driver.receive()
            ended = result.terminated | result.truncated
            trial.result.faults += int(ended.sum())
            driver.send(rows)
        driver.receive_rest()
        losses = sum(driver.ledger.losses.values()) + driver.ledger.num_padding
    trial.result.check("false timeouts", losses, 0, "==")


def _crash_loop(trial: Trial) -> None:
    delays, others = [], []
    most_starts = 0
    for _ in range(trial.count(20)):
        flag = trial.new_folder("flag") / "broken"
        kwargs = {"broken_by": str(flag)}
        with local_driver(
            trial, 2 * _NUM_WORKERS, _NUM_WORKERS, env_kwargs=kwargs
        ) as driver:
            driver.step()
            trial.result.faults += 1
            delay, num_valid = _end_for_good(driver, flag, trial)
        delays.append(delay)
        others.append(num_valid)
        most_starts = max(most_starts, _most_within_a_second(read_starts(flag)))
    trial.result.check("seconds until EnvStartError", max(delays), 3.0)
    trial.result.check("starts within a second", most_starts, 10)
    trial.result.check("valid rows of the others meanwhile", min(others), 100, ">=")


def _end_for_good(driver: Driver, flag: Path, trial: Trial) -> tuple[float, int]:
    """Kills a worker that cannot be replaced; steps all others until that is told.

    Returns:
      Seconds until then, and how many valid rows the other workers gave meanwhile.
    """
    (lane,) = driver.batch.lanes
    assert isinstance(lane, Pool)
    worker = int(trial.random.integers(_NUM_WORKERS))
    mine = driver.batch.blocks[worker]
    flag.touch()
    pid = lane.worker_pids[worker]
    assert pid is not None
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    num_valid = 0
    driver.send(np.arange(driver.batch.num_envs))
    while True:
        try:
            rows, result = driver.receive()
        except EnvStartError as error:
            if "the simulator's licence has expired" not in error.remote_traceback:
                trial.result.check("errors without their traceback", 1, 0, "==")
            driver.ledger.unanswered(driver.actions[mine], mine)
            break
        if not _is_same(rows, mine):
            num_valid += int(result.valid.sum())
        driver.send(rows)
    elapsed = time.monotonic() - began
    driver.receive_rest()
    return elapsed, num_valid


def _is_same(rows: Array, others: Array) -> bool:
    return bool(np.isin(rows, others).all())


def _most_within_a_second(instants: list[float]) -> int:
    times = np.array(sorted(instants))
    until = np.searchsorted(times, times + 1.0)
    return int((until - np.arange(len(times))).max(initial=0))


SLOW: Final = ChaosCase(
    "slow",
    f"resets take 0 to {_RESET_SECONDS:g} s, with step_timeout {_STEP_TIMEOUT:g} s",
    "no false timeouts",
    _slow,
    seconds=1200.0,
)
CRASH_LOOP: Final = ChaosCase(
    "crash-loop",
    "a worker is killed, and its envs cannot be built any more",
    "EnvStartError with the traceback in <= 3 s, <= 10 starts a second, others go on",
    _crash_loop,
    seconds=300.0,
)
