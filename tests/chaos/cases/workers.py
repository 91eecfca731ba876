"""Workers that are killed, raise or hang: each fault costs its rows one transition.

Other cases use envs with slow resets, which are not faults, and envs that cannot be
rebuilt.
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

from benchmarks.support.processes import usage_of, with_descendants
from envserve.errors import EnvStartError
from envserve.pool.pool import Pool
from envserve.slab import Status
from tests.chaos.batches import EPISODE, local_driver, remote_driver, running_servers
from tests.chaos.driver import FIRST_FAILURE_ACTION, Driver
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.trial import Trial, chaos_case, check_latency
from tests.oracle import import_threads
from tests.oracle.journal import Array

_NUM_ENVS: Final = 32
_NUM_WORKERS: Final = 4
_SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
#: Failures that end the worker, before or after the action is applied.
DEADLY: Final = {
    "kill": "before",
    "segfault": "after",
    "abort": "before",
    "exit": "after",
}
_HANGS: Final = {"hang": "before", "stop": "after", "spin": "after"}
_HANG_TIMEOUT: Final = 0.3
#: Failures that persist if the env is rebuilt in the same process, and the maximum
#: time in seconds until the row is valid again.
_SPOILED: Final = {"spoil": 0.2, "leak": 0.2, "wait_for_thread": _HANG_TIMEOUT + 0.2}
_SPOILED_ENVS: Final = 8
_MEMORY_MIB: Final = 4000
_REAPED_WITHIN_SECONDS: Final = 10.0
_MAX_DELAY_SECONDS: Final = 0.002
_STEP_TIMEOUT: Final = 0.5
_RESET_SECONDS: Final = 5.0


def failure_actions(failures: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Return failures for `LedgerEnv`, with one trigger action for each."""
    return {
        name: {"actions": [FIRST_FAILURE_ACTION + index], "when": when}
        for index, (name, when) in enumerate(failures.items())
    }


class WorkerKiller:
    """Kills workers of a local batch, one at a time."""

    def __init__(self, driver: Driver, injector: FaultInjector, trial: Trial) -> None:
        (lane,) = driver.batch.lanes
        assert isinstance(lane, Pool)
        self._lane = lane
        self._driver = driver
        self._injector = injector
        self._random = trial.random
        self._has_pending_kill = False
        self.num_kills = 0
        self.num_rows_hit = 0

    def kill_random_worker(self, actions: Array) -> bool:
        """Kill a worker whose rows are all valid; return False if there is none.

        Either a signal kills the worker within a few milliseconds, or a changed action
        kills it in the next step.
        """
        healthy = [
            (pid, self._rows_of(worker))
            for worker, pid in enumerate(self._lane.worker_pids)
            if pid is not None
            and not self._driver.recovery_times.is_recovering(self._rows_of(worker))
        ]
        if not healthy or self._has_pending_kill:
            return False
        pid, rows = healthy[self._random.integers(len(healthy))]
        if self._random.random() < 0.5:
            number = _SIGNALS[self._random.integers(len(_SIGNALS))]
            kill = functools.partial(self._send_signal, pid, number, rows)
            self._has_pending_kill = True
            self._injector.inject(self._random.uniform(0.0, _MAX_DELAY_SECONDS), kill)
            return True
        row = rows[self._random.integers(len(rows))]
        actions[row] = FIRST_FAILURE_ACTION + self._random.integers(len(DEADLY))
        self._driver.recovery_times.start(rows, time.monotonic())
        self._record_kill(rows)
        return True

    def _send_signal(self, pid: int, number: int, rows: Array) -> None:
        recovery_times = self._driver.recovery_times
        recovery_times.start(rows, time.monotonic())
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            recovery_times.cancel(rows)
        else:
            self._record_kill(rows)
        self._has_pending_kill = False

    def _record_kill(self, rows: Array) -> None:
        self.num_kills += 1
        self.num_rows_hit += len(rows)

    @property
    def has_pending_kill(self) -> bool:
        """Whether a signal is scheduled but not sent."""
        return self._has_pending_kill

    def _rows_of(self, worker: int) -> Array:
        blocks = [b for b in self._lane.blocks if b.worker == worker]
        return np.concatenate([np.arange(b.start, b.stop) for b in blocks])


@chaos_case(
    "workers end by SIGKILL, SIGSEGV, abort or os._exit, at random moments",
    "one lost row per env; valid again within 100 ms (p99)",
    seconds=900.0,
)
def kill(trial: Trial) -> None:
    num_rows, num_kills = trial.count(1_000_000), trial.count(1000, 4)
    kwargs = {"failures": failure_actions(DEADLY)}
    with (
        local_driver(trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs) as driver,
        FaultInjector() as injector,
    ):
        killer = WorkerKiller(driver, injector, trial)
        rows_between = num_rows / num_kills
        next_at = trial.random.exponential(rows_between)
        while driver.ledger.num_rows < num_rows or killer.num_kills < num_kills:
            actions = driver.draw()
            is_due = driver.ledger.num_rows >= next_at
            if (
                is_due
                and killer.num_kills < num_kills
                and killer.kill_random_worker(actions)
            ):
                next_at += trial.random.exponential(rows_between)
            driver.step(actions)
            trial.result.faults = killer.num_kills
        while killer.has_pending_kill:
            driver.step()
        driver.settle()
        trial.result.faults = killer.num_kills
        lost = sum(driver.ledger.losses.values())
    trial.result.check("lost rows / rows hit", lost / killer.num_rows_hit, 1, "==")
    check_latency(trial.result, 0.1)


@chaos_case(
    "an env raises in 1 of 1,000 steps",
    "one lost row, with the traceback; if a rebuilt env raises before a valid step, "
    "all rows of its worker, with the exception",
)
def raise_(trial: Trial) -> None:
    num_rows = trial.count(1_000_000, 2000)
    # In short runs, raise more often so that an env raises at least once.
    probability = max(0.001, 20.0 / num_rows)
    kwargs = {"failures": {"raise": {"probability": probability}}}
    with local_driver(trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs) as driver:
        while driver.ledger.num_rows < num_rows:
            driver.step()
            trial.result.faults = sum(driver.ledger.losses.values())
        driver.settle()
        faults = trial.result.faults = sum(driver.ledger.losses.values())
        error = "RuntimeError: the simulator lost its balance"
        num_with_traceback = driver.fault_texts[error]
        num_of_replaced = driver.ledger.losses[Status.WORKER_DIED]
        num_with_exception = sum(
            count
            for text, count in driver.fault_texts.items()
            if text.endswith(f"failed twice in a row: {error}")
        )
    num_raised = faults - num_of_replaced
    trial.result.check(
        "faults without their traceback", num_raised - num_with_traceback, 0, "=="
    )
    trial.result.check(
        "rows of replaced workers without the exception",
        num_of_replaced - num_with_exception,
        0,
        "==",
    )
    expected = probability * num_rows
    trial.result.check("faults", faults, expected / 4.0, ">=")


@chaos_case(
    f"steps hang: they sleep, stop the process, or hold the interpreter lock in C; "
    f"step_timeout {_HANG_TIMEOUT:g} s",
    "valid again within step_timeout + 200 ms (p99); no zombies",
    seconds=900.0,
)
def hang(trial: Trial) -> None:
    num_hangs = trial.count(1000, 6)
    kwargs = {"failures": failure_actions(_HANGS)}
    with local_driver(
        trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs=kwargs, step_timeout=_HANG_TIMEOUT
    ) as driver:
        driver.step()  # the first step of an env has a longer timeout
        while trial.result.faults < num_hangs:
            actions = driver.draw()
            blocks = trial.random.permutation(len(driver.batch.blocks))
            for block in blocks[: 1 + trial.random.integers(len(blocks))]:
                row = trial.random.choice(driver.batch.blocks[block])
                actions[row] = FIRST_FAILURE_ACTION + trial.random.integers(len(_HANGS))
                trial.result.faults += 1
            driver.step(actions)
            driver.settle()
            for _ in range(trial.random.integers(20)):
                driver.step()
        lost = dict(driver.ledger.losses)
        give_up_at = time.monotonic() + _REAPED_WITHIN_SECONDS
        # A worker that was lost in the last step is reaped a moment later.
        while (zombies := num_zombies()) and time.monotonic() < give_up_at:
            driver.step()
    trial.result.check("kinds of loss other than TIMEOUT", len(lost) - 1, 0, "==")
    trial.result.check("zombies", zombies, 0, "==")
    check_latency(trial.result, _HANG_TIMEOUT + 0.2)


@chaos_case(
    "an env makes its process unusable: every later step raises, memory is used up, or "
    f"a thread of an import is missing; step_timeout {_HANG_TIMEOUT:g} s",
    "valid again within 200 ms, or within step_timeout + 200 ms if a thread is missing "
    "(p99)",
    seconds=900.0,
)
def spoiled(trial: Trial) -> None:
    kwargs = {"failures": failure_actions(dict.fromkeys(_SPOILED, "before"))}
    options = [
        *("--import", import_threads.MODULE, "--step-timeout", str(_HANG_TIMEOUT)),
        *("--worker-memory-mib", str(_MEMORY_MIB)),
    ]
    with (
        running_servers(trial, 1, _SPOILED_ENVS, *options) as servers,
        remote_driver(
            trial, [servers[0].address], _SPOILED_ENVS, env_kwargs=kwargs
        ) as driver,
    ):
        for number, (name, seconds) in enumerate(_SPOILED.items()):
            num_before = len(driver.recovery_times.seconds)
            for _ in range(trial.count(200)):
                # Repeat the action, because it takes several leaks to fill the memory.
                while not driver.recovery_times.is_recovering():
                    actions = driver.draw()
                    row = trial.random.integers(_SPOILED_ENVS)
                    actions[row] = FIRST_FAILURE_ACTION + number
                    driver.step(actions)
                trial.result.faults += 1
                driver.settle()
                for _ in range(trial.random.integers(20)):
                    driver.step()
            needed = np.quantile(driver.recovery_times.seconds[num_before:], 0.99)
            meaning = f"{name}: p99 seconds to a valid row"
            trial.result.check(meaning, float(needed), seconds)


def num_zombies() -> int:
    """Return the number of zombie descendants."""
    found = [usage_of(pid) for pid in with_descendants(os.getpid())[1:]]
    return sum(usage is not None and usage.state == "Z" for usage in found)


@chaos_case(
    f"resets take 0 to {_RESET_SECONDS:g} s, with step_timeout {_STEP_TIMEOUT:g} s",
    "no false timeouts",
    seconds=1200.0,
)
def slow(trial: Trial) -> None:
    num_resets = trial.count(10_000)
    num_envs = 64 if trial.scale >= 0.1 else 16
    most = trial.seconds(_RESET_SECONDS, least=0.2)
    kwargs = {"max_reset_seconds": most, "length": EPISODE}
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
    "a worker is killed, and its envs cannot be rebuilt",
    "EnvStartError with the traceback within 3 s; at most 10 starts per second; "
    "other envs continue",
    seconds=300.0,
)
def crash_loop(trial: Trial) -> None:
    delays, others = [], []
    max_starts = 0
    for _ in range(trial.count(20)):
        flag = trial.new_folder("flag") / "broken"
        kwargs = {"failure_flag": str(flag)}
        with local_driver(
            trial, 2 * _NUM_WORKERS, _NUM_WORKERS, env_kwargs=kwargs
        ) as driver:
            driver.step()
            trial.result.faults += 1
            delay, num_valid = _kill_permanently(driver, flag, trial)
        delays.append(delay)
        others.append(num_valid)
        starts = [float(line) for line in flag.read_text().split()]
        max_starts = max(max_starts, _most_within_a_second(starts))
    trial.result.check("seconds until EnvStartError", max(delays), 3.0)
    trial.result.check("starts within a second", max_starts, 10)
    trial.result.check("valid rows of other workers", min(others), 100, ">=")


def _kill_permanently(driver: Driver, flag: Path, trial: Trial) -> tuple[float, int]:
    """Kill a worker that cannot be restarted; step the other workers until the error.

    Returns:
      Seconds until the error, and the number of valid rows of other workers.
    """
    (lane,) = driver.batch.lanes
    assert isinstance(lane, Pool)
    worker = int(trial.random.integers(_NUM_WORKERS))
    lost_rows = driver.batch.blocks[worker]
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
            driver.ledger.mark_unanswered(driver.actions[lost_rows], lost_rows)
            break
        if not _are_all_in(rows, lost_rows):
            num_valid += int(result.valid.sum())
        driver.send(rows)
    elapsed = time.monotonic() - began
    driver.receive_rest()
    return elapsed, num_valid


def _are_all_in(rows: Array, others: Array) -> bool:
    return bool(np.isin(rows, others).all())


def _most_within_a_second(instants: list[float]) -> int:
    times = np.array(sorted(instants))
    until = np.searchsorted(times, times + 1.0)
    return int((until - np.arange(len(times))).max(initial=0))
