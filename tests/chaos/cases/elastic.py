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
    "at most one lost row per env that moves; rows of all other servers stay valid",
    seconds=4 * 3600.0,
)
def elastic(trial: Trial) -> None:
    """Add servers, and kill or drain others.

    Rows also move when lanes are rebalanced, which costs one lost row, too: with
    autoreset mode `same_step`, the caller already has the first observation of the
    episode that the move ends.
    """
    list_file = trial.new_folder("source") / "servers"
    servers: list[ServerProcess] = []
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
        moves = _Moves(driver)
        injector = stack.enter_context(FaultInjector())
        for _ in range(trial.count(500)):  # each iteration makes two changes
            add()
            leaving = servers.pop(trial.random.integers(len(servers)))
            if trial.random.random() < 0.5:  # otherwise it remains listed
                list_file.write_text("\n".join(one.address for one in servers))
            rows = np.flatnonzero(moves.is_on(leaving))
            end = functools.partial(_end, leaving, driver, rows, trial.random.random())
            injector.inject(trial.random.uniform(0.0, _MAX_DELAY_SECONDS), end)
            trial.result.faults += 2
            while moves.is_on(leaving).any() or moves.is_moving.any():
                moves.step(leaving)
            for _ in range(trial.random.integers(1, 50)):
                moves.step(leaving)
        while moves.is_moving.any():
            moves.step(leaving)
        lost = driver.ledger.losses[Status.SERVER_LOST]
    # If a row's new server is lost at once, two moves cost only one lost row.
    ratio = lost / max(1, moves.num_moved)
    trial.result.check("lost rows / rows that moved", ratio, 1, "<=")
    trial.result.check("invalid rows of other servers", moves.num_disturbed, 0, "==")


class _Moves:
    """Counts the rows that get new envs, and invalid results of all other rows.

    Attributes:
      is_moving: bool `[num_envs]`; whether a row is on a server that ends, or has a new
      env that has not returned a valid result yet.
      num_moved: Number of rows that have received new envs.
      num_disturbed: Number of invalid results of rows that do not move.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._num_leases = self._leases()
        self.is_moving = np.zeros(driver.batch.num_envs, np.bool_)
        self.num_moved = self.num_disturbed = 0

    def _leases(self) -> Array:
        lanes = self._driver.batch.lanes
        num_leases = [lane.stats()["reattaches"] for lane in lanes]
        return np.repeat(num_leases, [lane.num_envs for lane in lanes])

    def is_on(self, server: ServerProcess) -> Array:
        """Return whether each row is on a server, bool `[num_envs]`."""
        lanes = self._driver.batch.lanes
        is_there = [lane.name == server.address for lane in lanes]
        return np.repeat(is_there, [lane.num_envs for lane in lanes])

    def step(self, leaving: ServerProcess) -> None:
        """Step all rows once, while a server ends or has ended."""
        self.is_moving |= self.is_on(leaving)
        valid = self._driver.step().valid
        before, self._num_leases = self._num_leases, self._leases()
        self.num_moved += int((self._num_leases - before).sum())
        self.is_moving |= self._num_leases > before
        self.num_disturbed += int((~valid & ~self.is_moving).sum())
        self.is_moving &= ~valid


def _end(server: ServerProcess, driver: Driver, rows: Array, chance: float) -> None:
    """Drain or kill a server, depending on a random number from 0 to 1."""
    if chance < 0.5:
        server.signal(signal.SIGTERM)
        return
    driver.recovery_times.start(rows, time.monotonic())
    server.kill()
