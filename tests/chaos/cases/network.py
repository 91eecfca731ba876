"""Connections that fail, or delay, copy or reorder messages, without visible effect."""

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
_NO_FAULTS: Final = NetworkFaults()
_NUM_FAULTS: Final = 10_000
#: Faults that require parsing messages, which is impossible with encryption.
_TAMPERING: Final = {"drop", "duplicate", "stale_copy", "retry", "reorder"}


def _bad_network(
    trial: Trial, *, faults: NetworkFaults, counted: tuple[str, ...], num_proxies: int
) -> None:
    """Step until enough faults have happened.

    Args:
      counted: Names of the faults to count; each must happen often enough.
      num_proxies: Number of proxies, each with its own connection to the only server.
    """
    num_faults = trial.count(_NUM_FAULTS)
    insecure = not _TAMPERING.isdisjoint(counted)
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
        count = functools.partial(_least_count, proxies, counted)
        _set_faults(proxies, faults)
        _step_until_enough_faults(driver, trial, count, num_faults)
        _set_faults(proxies, _NO_FAULTS)
        driver.receive_rest()
        ledger = driver.ledger
    trial.result.faults = count()
    trial.result.check("rows not valid", ledger.num_rows - ledger.num_valid, 0, "==")
    trial.result.check("actions without a result", ledger.num_unseen, 0, "==")


def _step_until_enough_faults(
    driver: Driver, trial: Trial, count: Callable[[], int], num_faults: int
) -> None:
    """Step each block again once its result arrives."""
    driver.send(np.arange(_NUM_ENVS))
    while trial.result.faults < num_faults:
        rows, _ = driver.receive()
        driver.send(rows)
        trial.result.faults = count()


def _least_count(proxies: list[Proxy], counted: tuple[str, ...]) -> int:
    directions = [d for p in proxies for d in (p.to_server, p.to_client)]
    return min(sum(d.counts[name] for d in directions) for name in counted)


def _set_faults(proxies: list[Proxy], faults: NetworkFaults) -> None:
    for proxy in proxies:
        proxy.change(to_server=faults, to_client=faults)


def _case(
    name: str,
    fault: str,
    faults: NetworkFaults,
    *counted: str,
    num_proxies: int = 1,
    seconds: float = 1200.0,
) -> ChaosCase:
    run = functools.partial(
        _bad_network, faults=faults, counted=counted, num_proxies=num_proxies
    )
    return ChaosCase(f"network-{name}", fault, "no visible effect", run, seconds)


NETWORK: Final = (
    _case(
        "reset",
        "connections are reset after 4,000 bytes on average, anywhere in a message",
        NetworkFaults(bytes_until_reset=4000.0),
        "reset",
        num_proxies=_NUM_ENVS,
    ),
    _case(
        "loss",
        "1 in 25 messages is lost",
        NetworkFaults(drop=0.04),
        "drop",
        seconds=7200.0,  # each loss is detected only after a timeout
    ),
    _case(
        "copies",
        "3 in 10 messages arrive twice, and 3 in 10 again up to 20 messages later",
        NetworkFaults(duplicate=0.3, stale_copy=0.3),
        *("duplicate", "stale_copy"),
    ),
    _case(
        "retry",
        "7 in 10 requests are retried before the first attempt has finished",
        NetworkFaults(retry=0.7),
        "retry",
    ),
    _case(
        "reorder",
        "3 in 10 messages arrive after the next message",
        NetworkFaults(reorder=0.3),
        "reorder",
    ),
    _case(
        "slices",
        "all traffic is written byte by byte",
        NetworkFaults(slice_bytes=1),
        "messages",
    ),
    _case(
        "latency",
        "all traffic is delayed by 50 to 150 ms",
        NetworkFaults(latency_seconds=0.05, jitter_seconds=0.1),
        "messages",
    ),
)
