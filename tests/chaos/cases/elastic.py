"""Servers that are killed, drained or added while a batch is stepped."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from typing import Final

import numpy as np

from envserve.slab import Status
from tests.chaos.batches import remote_driver, running_server
from tests.chaos.driver import Driver
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.trial import Trial, chaos_case
from tests.envserve.server_process import ServerProcess
from tests.oracle.journal import Array

_NUM_LANES: Final = 4
_LANE_ENVS: Final = 4
#: Capacity of a server: twice its share, so that it can replace another server.
_SERVER_ENVS: Final = 2 * _LANE_ENVS
_MAX_DELAY_SECONDS: Final = 0.005


@chaos_case(
    "four servers listed in a file: one is added, then one is killed or drained",
    "one lost row per env that moves; rows of all other servers stay valid",
    seconds=4 * 3600.0,
)
def elastic(trial: Trial) -> None:
    list_file = trial.new_folder("source") / "servers"
    servers: list[ServerProcess] = []
    num_moved = num_disturbed = 0
    with contextlib.ExitStack() as stack:

        def add() -> None:
            server = stack.enter_context(running_server(trial, _SERVER_ENVS))
            server.wait_until_ready()
            servers.append(server)
            list_file.write_text("\n".join(one.address for one in servers))

        for _ in range(_NUM_LANES):
            add()
        num_envs = _NUM_LANES * _LANE_ENVS
        addresses, options = [f"file://{list_file}"], {"server_lost_after": 600.0}
        driver = stack.enter_context(
            remote_driver(trial, addresses, num_envs, **options)
        )
        injector = stack.enter_context(FaultInjector())
        for _ in range(trial.count(500)):  # each iteration makes two changes
            add()
            leaving = servers.pop(trial.random.integers(len(servers)))
            if trial.random.random() < 0.5:  # otherwise it remains listed
                list_file.write_text("\n".join(one.address for one in servers))
            rows = _rows_at(driver, leaving)
            end = functools.partial(_end, leaving, driver, rows, trial.random.random())
            injector.inject(trial.random.uniform(0.0, _MAX_DELAY_SECONDS), end)
            trial.result.faults += 2
            num_moved += rows.size
            num_disturbed += _settle(driver, leaving, rows)
            for _ in range(trial.random.integers(1, 50)):
                num_disturbed += int((~driver.step().valid).sum())
        lost = driver.ledger.losses[Status.SERVER_LOST]
    trial.result.check("lost rows / rows that moved", lost / max(1, num_moved), 1, "==")
    trial.result.check("invalid rows of other servers", num_disturbed, 0, "==")


def _rows_at(driver: Driver, server: ServerProcess) -> Array:
    names = [lane.name for lane in driver.batch.lanes]
    is_at_server = np.repeat([name == server.address for name in names], _LANE_ENVS)
    return np.flatnonzero(is_at_server)


def _end(server: ServerProcess, driver: Driver, rows: Array, chance: float) -> None:
    """Drain or kill a server, depending on a random number from 0 to 1."""
    if chance < 0.5:
        server.signal(signal.SIGTERM)
        return
    driver.recovery_times.start(rows, time.monotonic())
    server.kill()


def _settle(driver: Driver, leaving: ServerProcess, rows: Array) -> int:
    """Step until these rows have moved; return the number of other invalid rows."""
    num_disturbed = 0
    while True:
        result = driver.step()
        num_disturbed += int((~np.delete(result.valid, rows)).sum())
        if not _rows_at(driver, leaving).size and result.valid.all():
            return num_disturbed
