"""Connections that break, delay, copy and reorder: whoever steps sees nothing of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Final

import numpy as np

from tests.chaos.batches import remote_driver, running_servers
from tests.chaos.driver import Driver
from tests.chaos.network_faults import NetworkFaults
from tests.chaos.proxy import Proxy
from tests.chaos.trial import ChaosCase, Trial

_NUM_ENVS: Final = 32
_CALM: Final = NetworkFaults()
_NUM_FAULTS: Final = 10_000
#: What must know where messages begin, and change their order: keys forbid both.
_TAMPERING: Final = {"drop", "duplicate", "stale_copy", "retry", "reorder"}


def _bad_network(
    trial: Trial, *, faults: NetworkFaults, strikes: tuple[str, ...], num_proxies: int
) -> None:
    """Steps until so many faults have struck.

    Args:
      strikes: What counts as a fault, by name; each of them has to strike so often.
      num_proxies: Connections to the server, which has all envs.
    """
    num_faults = trial.count(_NUM_FAULTS)
    insecure = not _TAMPERING.isdisjoint(strikes)
    options = ("--insecure-no-auth",) if insecure else ()
    with contextlib.ExitStack() as stack:
        (server,) = stack.enter_context(running_servers(trial, 1, _NUM_ENVS, *options))
        proxies = [
            stack.enter_context(Proxy(server.address, seed=trial.seed + index))
            for index in range(num_proxies)
        ]
        driver = stack.enter_context(
            remote_driver(
                trial,
                [proxy.address for proxy in proxies],
                _NUM_ENVS,
                num_splits=max(1, _NUM_ENVS // num_proxies),
                insecure=insecure,
            )
        )
        count = functools.partial(_fewest, proxies, strikes)
        _change(proxies, faults)
        _play(driver, trial, count, num_faults)
        _change(proxies, _CALM)
        driver.receive_rest()
        ledger = driver.ledger
    trial.result.faults = count()
    trial.result.check("rows not valid", ledger.num_rows - ledger.num_valid, 0, "==")
    trial.result.check("actions without a result", ledger.num_unseen, 0, "==")


def _play(
    driver: Driver, trial: Trial, count: Callable[[], int], num_faults: int
) -> None:
    """Sends each block anew when its result is there, until that is enough."""
    driver.send(np.arange(_NUM_ENVS))
    while trial.result.faults < num_faults:
        rows, _ = driver.receive()
        driver.send(rows)
        trial.result.faults = count()


def _fewest(proxies: list[Proxy], strikes: tuple[str, ...]) -> int:
    directions = [d for p in proxies for d in (p.to_server, p.to_client)]
    return min(sum(d.counts[name] for d in directions) for name in strikes)


def _change(proxies: list[Proxy], faults: NetworkFaults) -> None:
    for proxy in proxies:
        proxy.change(to_server=faults, to_client=faults)


def _case(
    name: str,
    does: str,
    faults: NetworkFaults,
    *strikes: str,
    num_proxies: int = 1,
    seconds: float = 1200.0,
) -> ChaosCase:
    run = functools.partial(
        _bad_network, faults=faults, strikes=strikes, num_proxies=num_proxies
    )
    return ChaosCase(f"network-{name}", does, "nothing is seen of it", run, seconds)


NETWORK: Final = (
    _case(
        "reset",
        "connections are reset after 4,000 bytes on average, wherever that is",
        NetworkFaults(bytes_until_reset=4000.0),
        "reset",
        num_proxies=_NUM_ENVS,
    ),
    _case(
        "loss",
        "1 in 25 messages is lost",
        NetworkFaults(drop=0.04),
        "drop",
        seconds=7200.0,  # each is noticed after a while only
    ),
    _case(
        "copies",
        "3 in 10 messages come twice, as many once more up to 20 messages later",
        NetworkFaults(duplicate=0.3, stale_copy=0.3),
        *("duplicate", "stale_copy"),
    ),
    _case(
        "retry",
        "7 in 10 requests are followed at once by a second attempt",
        NetworkFaults(retry=0.7),
        "retry",
    ),
    _case(
        "reorder",
        "3 in 10 messages are overtaken by the next",
        NetworkFaults(reorder=0.3),
        "reorder",
    ),
    _case(
        "slices",
        "everything is written byte by byte",
        NetworkFaults(slice_bytes=1),
        "messages",
    ),
    _case(
        "latency",
        "everything takes 50 to 150 ms longer",
        NetworkFaults(latency_seconds=0.05, jitter_seconds=0.1),
        "messages",
    ),
)
