"""Servers that are killed and restarted, paused, drained, or killed permanently."""

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
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.trial import Trial, chaos_case, check_latency
from tests.envserve.server_process import ServerProcess
from tests.oracle.journal import Array

_NUM_ENVS: Final = 8  # per server
_MAX_DELAY_SECONDS: Final = 0.005
_LOST_AFTER: Final = 5.0
_GRACE_SECONDS: Final = 1.0
_DRAINED_LOST_AFTER: Final = 1.0
#: Length of episodes that outlast every grace period.
_ENDLESS: Final = 10**6


@chaos_case(
    "one of two servers is killed and restarted at its address",
    "one lost row per env; valid again within 1.5 s (p99); no stale step executed",
    seconds=900.0,
)
def server_kill(trial: Trial) -> None:
    num_kills = trial.count(200)
    with (
        running_servers(trial, 2, _NUM_ENVS) as servers,
        remote_driver(trial, [s.address for s in servers], 2 * _NUM_ENVS) as driver,
        FaultInjector() as injector,
    ):
        for _ in range(num_kills):
            which = int(trial.random.integers(2))
            rows = np.arange(which * _NUM_ENVS, (which + 1) * _NUM_ENVS)
            kill = functools.partial(kill_and_restart, servers[which], driver, rows)
            _inject_and_settle(trial, injector, kill, driver, rows)
            trial.result.faults += 1
            for _ in range(trial.random.integers(1, 50)):
                driver.step()
        lost = driver.ledger.losses[Status.SERVER_LOST]
    expected = num_kills * _NUM_ENVS
    trial.result.check("lost rows / rows hit", lost / expected, 1, "==")
    check_latency(trial.result, 1.5)


def kill_and_restart(server: ServerProcess, driver: Driver, rows: Array) -> None:
    """Kill the server of these rows, and restart it at the same address."""
    driver.recovery_times.start(rows, time.monotonic())
    server.kill()
    server.restart()
    server.wait_until_ready()


def _inject_and_settle(
    trial: Trial,
    injector: FaultInjector,
    act: Callable[[], None],
    driver: Driver,
    rows: Array,
) -> None:
    """Inject a fault while all rows are stepped; step until they are valid again."""
    injector.inject(trial.random.uniform(0.0, _MAX_DELAY_SECONDS), act)
    while not driver.recovery_times.is_recovering(rows):
        driver.step()
    driver.settle()


@chaos_case(
    "one of two servers is suspended repeatedly, for 20 s, 2 s or up to 0.3 s",
    "no lost row, no step executed twice; valid again within 1.5 s after the server "
    "continues (p99)",
    seconds=1800.0,
)
def pause(trial: Trial) -> None:
    num_pauses = trial.count(1000)
    # Long pauses are left out at tiny scales, where they would take too long.
    num_long = trial.count(5) if trial.scale >= 0.01 else 0
    num_middle = trial.count(45) if trial.scale >= 0.01 else 0
    with (
        running_servers(trial, 2, _NUM_ENVS) as (other, server),
        remote_driver(trial, [other.address, server.address], 2 * _NUM_ENVS) as driver,
        FaultInjector() as injector,
    ):
        rows, num_late = np.arange(_NUM_ENVS, 2 * _NUM_ENVS), 0
        for index in range(num_pauses):
            if index < num_long:
                duration = trial.seconds(20.0, least=5.0)
            elif index < num_long + num_middle:
                duration = 2.0
            else:
                duration = trial.random.uniform(0.01, 0.3)
            _pause_once(trial, injector, server, driver, rows, duration)
            trial.result.faults += 1
            if index < num_long:
                num_late = driver.ledger.num_late
        losses = sum(driver.ledger.losses.values())
    expected = num_long * _NUM_ENVS
    trial.result.check("late rows in the longest pauses", num_late, expected, "==")
    trial.result.check("lost rows", losses, 0, "==")
    check_latency(trial.result, 1.5)


def _pause_once(
    trial: Trial,
    injector: FaultInjector,
    server: ServerProcess,
    driver: Driver,
    rows: Array,
    duration: float,
) -> None:
    """Pause a server; measure the recovery from the moment it continues."""
    resumed: list[float] = []

    def pause() -> None:
        server.signal(signal.SIGSTOP)
        time.sleep(duration)
        resumed.append(time.monotonic())
        server.signal(signal.SIGCONT)

    injector.inject(trial.random.uniform(0.0, _MAX_DELAY_SECONDS), pause)
    while not (driver.step().status[rows] == Status.OK).all() or not resumed:
        pass
    trial.result.seconds.append(time.monotonic() - resumed[0])
    # Discard the driver's times, because they include the pause itself.
    driver.recovery_times.seconds.clear()


@chaos_case(
    "one of three servers is killed and not restarted",
    "the others keep at least 95 % of their throughput; then ServerLost, or padding",
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
            # Measure once the loss is detected; before that, steps wait for the server.
            while (driver.step().status[:_NUM_ENVS] != Status.PENDING).any():
                pass
            shares.append(_throughput(driver, others, window) / before)
            if choice == "raise":
                _step_until_server_error(driver)
                delays.append(time.monotonic() - killed_at)
                continue
            while time.monotonic() - killed_at < window + 2.0 * lost_after:
                driver.step()
    trial.result.check(
        "share of the throughput that the others keep", min(shares), 0.95, ">="
    )
    late = max(delays) - window - lost_after
    trial.result.check("seconds after server_lost_after until ServerLost", late, 2.0)


def _throughput(driver: Driver, rows: Array, seconds: float) -> float:
    began, num_valid = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        num_valid += int(driver.step().valid[rows].sum())
    return num_valid / (time.monotonic() - began)


@chaos_case(
    f"a server receives SIGTERM under load; grace period {_GRACE_SECONDS:g} s",
    "exit code 0 within the grace period + 1 s",
    seconds=1800.0,
)
def drain(trial: Trial) -> None:
    codes: list[int] = []
    seconds: list[float] = []
    options = ("--drain-grace", str(_GRACE_SECONDS))
    for index in range(trial.count(200, 2)):
        # Alternate between episodes that end within the grace period and longer ones.
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
            FaultInjector() as injector,
        ):
            end = functools.partial(_terminate, server, codes, seconds)
            injector.inject(trial.random.uniform(0.0, 0.1), end)
            trial.result.faults += 1
            _step_until_server_error(driver)
    trial.result.seconds += seconds
    bound = _GRACE_SECONDS + 1.0
    trial.result.check("seconds from SIGTERM to the exit", max(seconds), bound)
    trial.result.check("exit codes other than 0", sum(map(bool, codes)), 0, "==")
    trial.result.notes.append("times from SIGTERM to the exit")


def _terminate(server: ServerProcess, codes: list[int], seconds: list[float]) -> None:
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    codes.append(server.wait())
    seconds.append(time.monotonic() - began)


def _step_until_server_error(driver: Driver) -> None:
    while True:
        try:
            driver.step()
        except ServerError:
            driver.ledger.mark_unanswered(driver.actions)
            return
