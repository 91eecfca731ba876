"""Workers that are killed, raise or hang: each costs its own rows one transition."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from benchmarks.lab.processes import vitals_of, with_descendants
from envserve.pool.pool import Pool
from tests.chaos.batches import local_driver
from tests.chaos.driver import FIRST_TRAP, Driver
from tests.chaos.recoveries import Array
from tests.chaos.striker import Striker, signal_process
from tests.chaos.trial import ChaosCase, Trial, check_latency

_NUM_ENVS: Final = 32
_NUM_WORKERS: Final = 4
_SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
#: Ends that come from within a step; "after" the action was applied, or before.
_DEADLY: Final = (
    ("kill", "before"),
    ("segfault", "after"),
    ("abort", "before"),
    ("exit", "after"),
)
_HANGS: Final = ("hang", "stop", "spin")
_HANG_TIMEOUT: Final = 0.3
_LATEST_STRIKE: Final = 0.002


def deadly_traps() -> dict[str, Mapping[str, Any]]:
    """Returns breakdowns for `LedgerEnv`: actions that end the process."""
    return {
        name: {"actions": [FIRST_TRAP + index], "when": when}
        for index, (name, when) in enumerate(_DEADLY)
    }


class KillDrill:
    """Ends workers of a local batch, one at a time for each worker.

    Attributes:
      num_kills: How many have ended by it.
      num_rows_hit: Rows that they had.
    """

    def __init__(self, driver: Driver, striker: Striker, trial: Trial) -> None:
        (lane,) = driver.batch.lanes
        assert isinstance(lane, Pool)
        self._lane = lane
        self._driver = driver
        self._striker = striker
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
            self._striker.strike(self._random.uniform(0.0, _LATEST_STRIKE), strike)
            return True
        row = rows[self._random.integers(len(rows))]
        actions[row] = FIRST_TRAP + self._random.integers(len(_DEADLY))
        self._driver.recoveries.strike(rows, time.monotonic())
        self._count(rows)
        return True

    def _strike(self, pid: int, number: int, rows: Array) -> None:
        if signal_process(pid, number, self._driver.recoveries, rows):
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


def _kill(trial: Trial) -> None:
    num_rows, num_kills = trial.count(1_000_000), trial.count(1000, 4)
    kwargs = {"breakdowns": deadly_traps()}
    with (
        local_driver(trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs) as driver,
        Striker() as striker,
    ):
        drill = KillDrill(driver, striker, trial)
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
    check_latency(trial.result, 99, 0.1)


def _raise(trial: Trial) -> None:
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


def _hang(trial: Trial) -> None:
    num_hangs = trial.count(1000, 6)
    kwargs = {
        "breakdowns": {
            name: {"actions": [FIRST_TRAP + index], "when": when}
            for index, (name, when) in enumerate(
                zip(_HANGS, ("before", "after", "after"), strict=True)
            )
        }
    }
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
        zombies = num_zombies()
    trial.result.check("kinds of loss other than TIMEOUT", len(lost) - 1, 0, "==")
    trial.result.check("zombies", zombies, 0, "==")
    check_latency(trial.result, 99, _HANG_TIMEOUT + 0.2)


def num_zombies() -> int:
    """Returns how many processes of ours have ended and were not waited for."""
    found = [vitals_of(pid) for pid in with_descendants(os.getpid())[1:]]
    return sum(vitals is not None and vitals.state == "Z" for vitals in found)


KILL: Final = ChaosCase(
    "kill",
    "workers end by SIGKILL, SIGSEGV, abort or os._exit, at random phases",
    "one lost row per env; p99 <= 100 ms to a valid row",
    _kill,
    seconds=900.0,
)
RAISE: Final = ChaosCase(
    "raise",
    "an env raises in 1 of 1,000 steps",
    "one lost row, with the traceback",
    _raise,
)
HANG: Final = ChaosCase(
    "hang",
    f"envs sleep, are stopped, or hold the interpreter's lock in C; "
    f"step_timeout {_HANG_TIMEOUT:g} s",
    "p99 <= step_timeout + 200 ms to a valid row, no zombies",
    _hang,
    seconds=900.0,
)
