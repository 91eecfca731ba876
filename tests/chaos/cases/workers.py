"""Workers that are killed, raise or hang: each costs its own rows one transition.

Also envs that are slow to reset, which is no fault, and some that never start.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.lab.processes import vitals_of, with_descendants
from envserve.errors import EnvStartError
from envserve.pool.pool import Pool
from tests.chaos.batches import EPISODE, local_driver
from tests.chaos.driver import FIRST_TRAP, Driver
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.trial import Trial, chaos_case, check_latency
from tests.oracle.journal import Array

_NUM_ENVS: Final = 32
_NUM_WORKERS: Final = 4
_SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
#: What comes from within a step; "after" the action was applied, or before.
DEADLY: Final = {
    "kill": "before",
    "segfault": "after",
    "abort": "before",
    "exit": "after",
}
_HANGS: Final = {"hang": "before", "stop": "after", "spin": "after"}
_HANG_TIMEOUT: Final = 0.3
_WAITED_FOR_WITHIN: Final = 10.0
_LATEST_STRIKE: Final = 0.002
_STEP_TIMEOUT: Final = 0.5
_RESET_SECONDS: Final = 5.0


def traps(breakdowns: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Returns breakdowns for `LedgerEnv`, by what they are: an action for each."""
    return {
        name: {"actions": [FIRST_TRAP + index], "when": when}
        for index, (name, when) in enumerate(breakdowns.items())
    }


class WorkerKiller:
    """Ends workers of a local batch, one at a time for each worker."""

    def __init__(self, driver: Driver, injector: FaultInjector, trial: Trial) -> None:
        (lane,) = driver.batch.lanes
        assert isinstance(lane, Pool)
        self._lane = lane
        self._driver = driver
        self._injector = injector
        self._random = trial.random
        self._is_under_way = False
        self.num_kills = 0
        self.num_rows_hit = 0

    def kill_any(self, actions: Array) -> bool:
        """Ends a worker whose rows are well; False if there is none.

        It is hit by a signal within the next moments, or, by a change of `actions`,
        from within the next step.
        """
        well = [
            (pid, self._rows_of(worker))
            for worker, pid in enumerate(self._lane.worker_pids)
            if pid is not None
            and not self._driver.recoveries.is_open(self._rows_of(worker))
        ]
        if not well or self._is_under_way:
            return False
        pid, rows = well[self._random.integers(len(well))]
        if self._random.random() < 0.5:
            number = _SIGNALS[self._random.integers(len(_SIGNALS))]
            strike = functools.partial(self._strike, pid, number, rows)
            self._is_under_way = True
            self._injector.strike(self._random.uniform(0.0, _LATEST_STRIKE), strike)
            return True
        row = rows[self._random.integers(len(rows))]
        actions[row] = FIRST_TRAP + self._random.integers(len(DEADLY))
        self._driver.recoveries.strike(rows, time.monotonic())
        self._count(rows)
        return True

    def _strike(self, pid: int, number: int, rows: Array) -> None:
        recoveries = self._driver.recoveries
        recoveries.strike(rows, time.monotonic())
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            recoveries.retract(rows)
        else:
            self._count(rows)
        self._is_under_way = False

    def _count(self, rows: Array) -> None:
        self.num_kills += 1
        self.num_rows_hit += len(rows)

    @property
    def is_under_way(self) -> bool:
        """Whether a signal has yet to be sent."""
        return self._is_under_way

    def _rows_of(self, worker: int) -> Array:
        blocks = [b for b in self._lane.blocks if b.worker == worker]
        return np.concatenate([np.arange(b.start, b.stop) for b in blocks])


@chaos_case(
    "workers end by SIGKILL, SIGSEGV, abort or os._exit, at random phases",
    "one lost row per env; p99 <= 100 ms to a valid row",
    seconds=900.0,
)
def kill(trial: Trial) -> None:
    num_rows, num_kills = trial.count(1_000_000), trial.count(1000, 4)
    kwargs = {"breakdowns": traps(DEADLY)}
    with (
        local_driver(trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs) as driver,
        FaultInjector() as injector,
    ):
        drill = WorkerKiller(driver, injector, trial)
        rows_between = num_rows / num_kills
        next_at = trial.random.exponential(rows_between)
        while driver.ledger.num_rows < num_rows or drill.num_kills < num_kills:
            actions = driver.draw()
            is_due = driver.ledger.num_rows >= next_at
            if is_due and drill.num_kills < num_kills and drill.kill_any(actions):
                next_at += trial.random.exponential(rows_between)
            driver.step(actions)
            trial.result.faults = drill.num_kills
        while drill.is_under_way:
            driver.step()
        driver.settle()
        trial.result.faults = drill.num_kills
        lost = sum(driver.ledger.losses.values())
    trial.result.check("lost rows / rows hit", lost / drill.num_rows_hit, 1, "==")
    check_latency(trial.result, 0.1)


@chaos_case(
    "an env raises in 1 of 1,000 steps",
    "one lost row, with the traceback",
)
def raise_(trial: Trial) -> None:
    num_rows = trial.count(1_000_000, 2000)
    # In a short run it happens more often, so that it happens at all.
    probability = max(0.001, 20.0 / num_rows)
    kwargs = {"breakdowns": {"raise": {"probability": probability}}}
    with local_driver(trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs) as driver:
        while driver.ledger.num_rows < num_rows:
            driver.step()
            trial.result.faults = sum(driver.ledger.losses.values())
        driver.settle()
        faults = trial.result.faults = sum(driver.ledger.losses.values())
        told = driver.fault_texts["RuntimeError: the simulator lost its balance"]
    trial.result.check("faults without their traceback", faults - told, 0, "==")
    expected = probability * num_rows
    trial.result.check("faults", faults, expected / 4.0, ">=")


@chaos_case(
    f"envs sleep, are stopped, or hold the interpreter's lock in C; "
    f"step_timeout {_HANG_TIMEOUT:g} s",
    "p99 <= step_timeout + 200 ms to a valid row, no zombies",
    seconds=900.0,
)
def hang(trial: Trial) -> None:
    num_hangs = trial.count(1000, 6)
    kwargs = {"breakdowns": traps(_HANGS)}
    with local_driver(
        trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs, step_timeout=_HANG_TIMEOUT
    ) as driver:
        while trial.result.faults < num_hangs:
            actions = driver.draw()
            blocks = trial.random.permutation(len(driver.batch.blocks))
            for block in blocks[: 1 + trial.random.integers(len(blocks))]:
                row = trial.random.choice(driver.batch.blocks[block])
                actions[row] = FIRST_TRAP + trial.random.integers(len(_HANGS))
                trial.result.faults += 1
            driver.step(actions)
            driver.settle()
            for _ in range(trial.random.integers(20)):
                driver.step()
        lost = dict(driver.ledger.losses)
        give_up_at = time.monotonic() + _WAITED_FOR_WITHIN
        # A worker that was lost in the last step is waited for in a moment.
        while (zombies := num_zombies()) and time.monotonic() < give_up_at:
            driver.step()
    trial.result.check("kinds of loss other than TIMEOUT", len(lost) - 1, 0, "==")
    trial.result.check("zombies", zombies, 0, "==")
    check_latency(trial.result, _HANG_TIMEOUT + 0.2)


def num_zombies() -> int:
    """Returns how many processes of ours have ended and were not waited for."""
    found = [vitals_of(pid) for pid in with_descendants(os.getpid())[1:]]
    return sum(vitals is not None and vitals.state == "Z" for vitals in found)


@chaos_case(
    f"resets take 0 to {_RESET_SECONDS:g} s, with step_timeout {_STEP_TIMEOUT:g} s",
    "no false timeouts",
    seconds=1200.0,
)
def slow(trial: Trial) -> None:
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


@chaos_case(
    "a worker is killed, and its envs cannot be built any more",
    "EnvStartError with the traceback in <= 3 s, <= 10 starts a second, others go on",
    seconds=300.0,
)
def crash_loop(trial: Trial) -> None:
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
        starts = [float(line) for line in flag.read_text().split()]
        most_starts = max(most_starts, _most_within_a_second(starts))
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
            driver.ledger.mark_unanswered(driver.actions[mine], mine)
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
