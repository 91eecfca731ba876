"""Trainers that are killed, or that return after another trainer got their envs.

Their leases must end, and their late steps must not be executed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from benchmarks.support.processes import is_running, with_descendants
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import EnvsBusy, EnvTimeout, LeaseLost, ServerLost
from envserve.slab import Status
from tests.chaos.batches import remote_driver, running_servers
from tests.chaos.driver import Driver
from tests.chaos.network_faults import NetworkFaults
from tests.chaos.proxy import Proxy
from tests.chaos.trial import OutOfTime, Trial, chaos_case
from tests.envserve.server_process import ROOT, ServerProcess
from tests.oracle.batch_driver import MAX_CALL_SECONDS
from tests.oracle.result import LedgerError

_NUM_ENVS: Final = 4  # per trainer
_AT_ONCE: Final = 8
#: Longer than two intervals between the pings of idle clients, which are 1 s.
_LEASE_SECONDS: Final = 2.5
_LOOK_SECONDS: Final = 0.005
_POLL_SECONDS: Final = 0.05
_NO_FAULTS: Final = NetworkFaults()
#: Seconds within which a trainer must be notified that its lease is lost.
_NOTICE_SECONDS: Final = 0.5


@chaos_case(
    "trainers with local workers and with envs of a server are killed",
    "their workers exit within 2 s, their leases end, and no process is left",
    seconds=1800.0,
)
def trainer_kill(trial: Trial) -> None:
    num_kills = trial.count(200)
    gone: list[float] = []
    freed: list[float] = []
    lease = ("--lease-seconds", str(_LEASE_SECONDS))
    capacity = _AT_ONCE * _NUM_ENVS
    with running_servers(trial, 1, capacity, *lease) as (server,):
        while trial.result.faults < num_kills:
            _wait_until_free(server, capacity, trial)
            count = min(_AT_ONCE, num_kills - trial.result.faults)
            with contextlib.ExitStack() as stack:
                trainers = [
                    stack.enter_context(_trainer(server, trial)) for _ in range(count)
                ]
                for trainer in trainers:
                    _wait_until_stepping(trainer)
                for trainer in trainers:
                    # Kill it at a random moment of a step.
                    time.sleep(trial.random.uniform(0.0, 0.02))
                    gone.append(kill_with_workers(trainer, trial))
                    trial.result.faults += 1
                killed_at = time.monotonic()
            _wait_until_free(server, capacity, trial)
            freed.append(time.monotonic() - killed_at)
        left = len(server.worker_pids)
    trial.result.seconds += gone
    trial.result.check("seconds until the workers are gone", max(gone), 2.0)
    most = _LEASE_SECONDS + 2.0
    trial.result.check("seconds until the lease is free", max(freed), most)
    trial.result.check("workers left at the server", left, 0, "==")
    trial.result.notes.append("times until the trainer's own workers are gone")


@contextlib.contextmanager
def _trainer(server: ServerProcess, trial: Trial) -> Iterator[subprocess.Popen[str]]:
    seed = str(trial.random.integers(2**31))
    corruption = [] if trial.corruption is None else ["corruption"]
    command = [sys.executable, "-m", "tests.chaos.trainer"]
    with subprocess.Popen(
        [*command, server.address, str(_NUM_ENVS), seed, *corruption],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_until_stepping(trainer: subprocess.Popen[str]) -> None:
    assert trainer.stdout is not None
    if (line := trainer.stdout.readline()) != "stepping\n":
        raise _error_of(trainer, line)


def _error_of(trainer: subprocess.Popen[str], output: str) -> Exception:
    """Return the error of a trainer that has exited by itself."""
    if output.startswith("wrong: "):
        return LedgerError(output.removeprefix("wrong: ").strip())
    return RuntimeError(
        f"a trainer exited with code {trainer.wait()} before it was killed"
    )


def kill_with_workers(trainer: subprocess.Popen[str], trial: Trial) -> float:
    """Kill a trainer; return the seconds until all its descendants are gone."""
    ours = with_descendants(trainer.pid)
    began = time.monotonic()
    trainer.kill()
    if trainer.wait() != -9:  # it had exited before
        assert trainer.stdout is not None
        raise _error_of(trainer, trainer.stdout.read())
    # The rows that the trainer verified before it printed "stepping".
    trial.result.row_steps += 2 * _NUM_ENVS * 10
    while any(is_running(pid) for pid in ours):
        trial.check_time()
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


def _wait_until_free(server: ServerProcess, num_envs: int, trial: Trial) -> None:
    while request_welcome(server.address, 10.0).free_envs < num_envs:
        trial.check_time()
        time.sleep(_POLL_SECONDS)


@chaos_case(
    "a trainer's step arrives late, when another trainer has its envs",
    "the late trainer gets an error; no step of an old lease is executed",
    seconds=3000.0,
)
def two_trainers(trial: Trial) -> None:
    num_rounds = trial.count(1000)
    at_once = min(_AT_ONCE, num_rounds)
    lease = ("--lease-seconds", str(_LEASE_SECONDS))
    num_lost = 0
    # The server has only as many envs as needed, so that the second trainers need the
    # first trainers' envs.
    with running_servers(trial, 1, at_once * _NUM_ENVS, *lease) as (server,):
        while trial.result.faults < num_rounds:
            num_lost += _take_over(server, trial, at_once)
    faults = trial.result.faults
    trial.result.check("late trainers without an error", faults - num_lost, 0, "==")


def _take_over(server: ServerProcess, trial: Trial, count: int) -> int:
    """Let other trainers take over the envs of trainers whose steps are delayed.

    Returns:
      The number of late trainers that got an error.
    """
    rows = np.arange(_NUM_ENVS)
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy(server.address, seed=trial.seed))
        late = [_enter_when_free(stack, trial, proxy.address) for _ in range(count)]
        for driver in late:
            driver.step()
        proxy.change(to_server=NetworkFaults(is_stalled=True))
        for driver in late:
            driver.send(rows)
        with contextlib.ExitStack() as others:
            second = [
                _enter_when_free(others, trial, server.address) for _ in range(count)
            ]
            for driver in second:
                driver.step()
                driver.send(rows)
            trial.result.faults += count
            proxy.change(to_server=_NO_FAULTS)  # the late steps arrive now
            for driver in second:
                driver.receive_rest()
                driver.step()
            has_lost_envs = [_has_lost_envs(driver, _NOTICE_SECONDS) for driver in late]
            for driver in second:
                driver.step()
        for index, driver in enumerate(late):
            if has_lost_envs[index] is None:  # it can reconnect now: its envs are free
                has_lost_envs[index] = _has_lost_envs(driver, MAX_CALL_SECONDS)
    return sum(map(bool, has_lost_envs))


def _batch_of_all(
    trial: Trial, address: str
) -> contextlib.AbstractContextManager[Driver]:
    return remote_driver(
        trial, [address], _NUM_ENVS, server_lost_after=MAX_CALL_SECONDS
    )


def _has_lost_envs(driver: Driver, seconds: float) -> bool | None:
    """Receive the result of a step that was sent.

    Returns:
      Whether the result reports that the envs are lost; None after a timeout.
    """
    try:
        _, result = driver.receive(seconds)
    except EnvTimeout:
        return None
    except (LeaseLost, ServerLost, EnvsBusy):
        driver.ledger.mark_unanswered(driver.actions)
        return True
    return bool((result.status == Status.SERVER_LOST).all())


def _enter_when_free(stack: contextlib.ExitStack, trial: Trial, address: str) -> Driver:
    """Create a trainer as soon as the envs are free.

    If this process is so slow that the new lease expires as well, it retries.

    Raises:
      OutOfTime: The envs were not freed.
    """
    give_up_at = time.monotonic() + _LEASE_SECONDS + 30.0
    while time.monotonic() < give_up_at:
        try:
            return stack.enter_context(_batch_of_all(trial, address))
        except (EnvsBusy, LeaseLost):
            trial.check_time()
            time.sleep(_POLL_SECONDS)
    raise OutOfTime("the lease of an unresponsive trainer did not expire")
