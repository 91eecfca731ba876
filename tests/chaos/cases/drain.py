"""Servers that are told to end while their envs are stepped."""

from __future__ import annotations

import functools
import signal
import time
from typing import Final

from envserve.errors import ServerError
from tests.chaos.batches import remote_driver, running_servers
from tests.chaos.driver import Driver
from tests.chaos.striker import Striker
from tests.chaos.trial import ChaosCase, Trial
from tests.envserve.server_process import ServerProcess

_NUM_ENVS: Final = 8
_GRACE_SECONDS: Final = 1.0
_LOST_AFTER: Final = 1.0
#: An episode that takes longer than any grace.
_ENDLESS: Final = 10**6


def _drain(trial: Trial) -> None:
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
                server_lost_after=_LOST_AFTER,
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


DRAIN: Final = ChaosCase(
    "drain",
    f"a server gets SIGTERM under load; grace {_GRACE_SECONDS:g} s",
    "exit code 0 within grace + 1 s",
    _drain,
    seconds=1800.0,
)
