"""Servers that come and go: killed, drained and added, while a batch is stepped."""

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
#: How many envs a server has: room for the rows of one more that is gone.
_ROOM: Final = 2 * _LANE_ENVS
_LATEST_STRIKE: Final = 0.005


@chaos_case(
    "four servers that a file lists: in turns one is added, and one killed or drained",
    "a lost row per env that moves; rows of all other servers are valid at each step",
    seconds=4 * 3600.0,
)
def elastic(trial: Trial) -> None:
    listed = trial.new_folder("source") / "servers"
    servers: list[ServerProcess] = []
    num_moved = num_disturbed = 0
    with contextlib.ExitStack() as stack:

        def add() -> None:
            server = stack.enter_context(running_server(trial, _ROOM))
            server.wait_until_ready()
            servers.append(server)
            listed.write_text("\n".join(one.address for one in servers))

        for _ in range(_NUM_LANES):
            add()
        num_envs = _NUM_LANES * _LANE_ENVS
        words, options = [f"file://{listed}"], {"server_lost_after": 600.0}
        driver = stack.enter_context(remote_driver(trial, words, num_envs, **options))
        injector = stack.enter_context(FaultInjector())
        for _ in range(trial.count(500)):  # two changes each
            add()
            leaver = servers.pop(trial.random.integers(len(servers)))
            if trial.random.random() < 0.5:  # else it stays on the list meanwhile
                listed.write_text("\n".join(one.address for one in servers))
            rows = _rows_at(driver, leaver)
            end = functools.partial(_end, leaver, driver, rows, trial.random.random())
            injector.strike(trial.random.uniform(0.0, _LATEST_STRIKE), end)
            trial.result.faults += 2
            num_moved += rows.size
            num_disturbed += _settle(driver, leaver, rows)
            for _ in range(trial.random.integers(1, 50)):
                num_disturbed += int((~driver.step().valid).sum())
        lost = driver.ledger.losses[Status.SERVER_LOST]
    trial.result.check("lost rows / rows that moved", lost / max(1, num_moved), 1, "==")
    trial.result.check("rows of others that were not valid", num_disturbed, 0, "==")


def _rows_at(driver: Driver, server: ServerProcess) -> Array:
    names = [lane.name for lane in driver.batch.lanes]
    here = np.repeat([name == server.address for name in names], _LANE_ENVS)
    return np.flatnonzero(here)


def _end(server: ServerProcess, driver: Driver, rows: Array, chance: float) -> None:
    if chance < 0.5:
        server.signal(signal.SIGTERM)
        return
    driver.recoveries.strike(rows, time.monotonic())
    server.kill()


def _settle(driver: Driver, leaver: ServerProcess, rows: Array) -> int:
    """Steps until rows have moved; returns how many of others were not valid."""
    num_disturbed = 0
    while True:
        result = driver.step()
        num_disturbed += int((~np.delete(result.valid, rows)).sum())
        if not _rows_at(driver, leaver).size and result.valid.all():
            return num_disturbed
