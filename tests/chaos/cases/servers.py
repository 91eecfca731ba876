"""Servers that are killed, stopped for a while, drained, or gone for good."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from envserve.errors import ServerError
from envserve.slab import Status
from tests.chaos.batches import remote_driver, running_servers
from tests.chaos.driver import Driver
from tests.chaos.striker import Striker
from tests.chaos.trial import Trial, chaos_case, check_latency
from tests.envserve.server_process import ServerProcess
from tests.oracle.journal import Array

_NUM_ENVS: Final = 8  # of a server
_LATEST_STRIKE: Final = 0.005
_LOST_AFTER: Final = 5.0
_GRACE_SECONDS: Final = 1.0
_DRAINED_LOST_AFTER: Final = 1.0
#: An episode that takes longer than any grace.
_ENDLESS: Final = 10**6


@chaos_case(
    "one of two servers is killed and started again at its address",
    "one lost row per env; p99 <= 1.5 s; no stale step executed",
    seconds=900.0,
)
def server_kill(trial: Trial) -> None:
    num_kills = trial.count(200)
    with (
        running_servers(trial, 2, _NUM_ENVS) as servers,
        remote_driver(trial, [s.address for s in servers], 2 * _NUM_ENVS) as driver,
        Striker() as striker,
    ):
        for _ in range(num_kills):
            which = int(trial.random.integers(2))
            rows = np.arange(which * _NUM_ENVS, (which + 1) * _NUM_ENVS)
            kill = functools.partial(kill_and_restart, servers[which], driver, rows)
            _strike(trial, striker, kill, driver, rows)
            trial.result.faults += 1
            for _ in range(trial.random.integers(1, 50)):
                driver.step()
        lost = driver.ledger.losses[Status.SERVER_LOST]
    expected = num_kills * _NUM_ENVS
    trial.result.check("lost rows / rows hit", lost / expected, 1, "==")
    check_latency(trial.result, 1.5)


def kill_and_restart(server: ServerProcess, driver: Driver, rows: Array) -> None:
    """Kills a server that has these rows, and starts it at the same address."""
    driver.recoveries.strike(rows, time.monotonic())
    server.kill()
    server.restart()
    server.wait_until_ready()


def _strike(
    trial: Trial, striker: Striker, act: Callable[[], None], driver: Driver, rows: Array
) -> None:
    """Has a fault happen while all rows are stepped, until its rows are back."""
    striker.strike(trial.random.uniform(0.0, _LATEST_STRIKE), act)
    while not driver.recoveries.is_open(rows):
        driver.step()
    driver.settle()


@chaos_case(
    "one of two servers is stopped for 20 s, 2 s, and moments",
    "no lost row, no double step; p99 <= 1.5 s from its going on",
    seconds=1800.0,
)
def pause(trial: Trial) -> None:
    num_pauses = trial.count(1000)
    # Such that no moment is too short for them: not at the tiniest scales.
    num_long = trial.count(5) if trial.scale >= 0.01 else 0
    num_middle = trial.count(45) if trial.scale >= 0.01 else 0
    with (
        running_servers(trial, 2, _NUM_ENVS) as (calm, server),
        remote_driver(trial, [calm.address, server.address], 2 * _NUM_ENVS) as driver,
        Striker() as striker,
    ):
        rows, noticed = np.arange(_NUM_ENVS, 2 * _NUM_ENVS), 0
        for index in range(num_pauses):
            if index < num_long:
                duration = trial.seconds(20.0, least=5.0)
            elif index < num_long + num_middle:
                duration = 2.0
            else:
                duration = trial.random.uniform(0.01, 0.3)
            _pause_once(trial, striker, server, driver, rows, duration)
            trial.result.faults += 1
            if index < num_long:
                noticed = driver.ledger.num_late
        losses = sum(driver.ledger.losses.values())
    expected = num_long * _NUM_ENVS
    trial.result.check("late rows in the longest pauses", noticed, expected, "==")
    trial.result.check("lost rows", losses, 0, "==")
    check_latency(trial.result, 1.5)


def _pause_once(
    trial: Trial,
    striker: Striker,
    server: ServerProcess,
    driver: Driver,
    rows: Array,
    duration: float,
) -> None:
    """Stops a server for so long; its rows' clocks start when it goes on."""
    resumed: list[float] = []

    def pause() -> None:
        server.signal(signal.SIGSTOP)
        time.sleep(duration)
        resumed.append(time.monotonic())
        server.signal(signal.SIGCONT)

    striker.strike(trial.random.uniform(0.0, _LATEST_STRIKE), pause)
    while not (driver.step().status[rows] == Status.OK).all() or not resumed:
        pass
    trial.result.seconds.append(time.monotonic() - resumed[0])
    # They count from the beginning of a pause, which is of its own making.
    driver.recoveries.seconds.clear()


@chaos_case(
    "one of three servers is killed for good",
    "the others keep >= 95 % of their throughput; then ServerLost, or padding for good",
    seconds=300.0,
)
def server_gone(trial: Trial) -> None:
    window = trial.seconds(10.0, least=0.3)
    lost_after = trial.seconds(_LOST_AFTER, least=1.0)
    shares, delays = [], []
    for index in range(trial.count(4)):
        choice = ("raise", "pad")[index % 2]
        with (
            running_servers(trial, 3, _NUM_ENVS) as servers,
            remote_driver(
                trial,
                [server.address for server in servers],
                3 * _NUM_ENVS,
                server_lost_after=window + lost_after,
                on_server_lost=choice,
            ) as driver,
        ):
            others = np.arange(_NUM_ENVS, 3 * _NUM_ENVS)
            before = _throughput(driver, others, window)
            servers[0].kill()
            killed_at = time.monotonic()
            trial.result.faults += 1
            # Only where the loss is noticed: what a first silence takes is latency.
            while (driver.step().status[:_NUM_ENVS] != Status.PENDING).any():
                pass
            shares.append(_throughput(driver, others, window) / before)
            if choice == "raise":
                _step_until_told(driver)
                delays.append(time.monotonic() - killed_at)
                continue
            while time.monotonic() - killed_at < window + 2.0 * lost_after:
                driver.step()
    trial.result.check("throughput of the others, share", min(shares), 0.95, ">=")
    late = max(delays) - window - lost_after
    trial.result.check("seconds after server_lost_after until ServerLost", late, 2.0)


def _throughput(driver: Driver, rows: Array, seconds: float) -> float:
    began, num_valid = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        num_valid += int(driver.step().valid[rows].sum())
    return num_valid / (time.monotonic() - began)


@chaos_case(
    f"a server gets SIGTERM under load; grace {_GRACE_SECONDS:g} s",
    "exit code 0 within grace + 1 s",
    seconds=1800.0,
)
def drain(trial: Trial) -> None:
    codes: list[int] = []
    seconds: list[float] = []
    options = ("--drain-grace", str(_GRACE_SECONDS))
    for index in range(trial.count(200, 2)):
        # In turns: episodes that end by themselves in time, and such that do not.
        length = 10 if index % 2 else _ENDLESS
        with (
            running_servers(trial, 1, _NUM_ENVS, *options) as (server,),
            remote_driver(
                trial,
                [server.address],
                _NUM_ENVS,
                length=length,
                server_lost_after=_DRAINED_LOST_AFTER,
            ) as driver,
            Striker() as striker,
        ):
            end = functools.partial(_end, server, codes, seconds)
            striker.strike(trial.random.uniform(0.0, 0.1), end)
            trial.result.faults += 1
            _step_until_told(driver)
    trial.result.seconds += seconds
    bound = _GRACE_SECONDS + 1.0
    trial.result.check("most seconds until the exit", max(seconds), bound)
    trial.result.check("exit codes other than 0", sum(map(bool, codes)), 0, "==")
    trial.result.notes.append("the times are those from SIGTERM to the exit")


def _end(server: ServerProcess, codes: list[int], seconds: list[float]) -> None:
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    codes.append(server.wait())
    seconds.append(time.monotonic() - began)


def _step_until_told(driver: Driver) -> None:
    while True:
        try:
            driver.step()
        except ServerError:
            driver.ledger.unanswered(driver.actions)
            return
