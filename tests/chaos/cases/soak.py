"""All faults at once for ten minutes: memory does not grow, and nothing leaks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from tests.chaos.batches import local_driver, remote_driver, running_servers
from tests.chaos.cases.servers import kill_and_restart
from tests.chaos.cases.workers import DEADLY, WorkerKiller, failure_actions
from tests.chaos.driver import Driver
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.network_faults import NetworkFaults
from tests.chaos.proxy import Proxy
from tests.chaos.samples import Leftovers, MemorySamples
from tests.chaos.trial import Trial, chaos_case
from tests.envserve.server_process import ServerProcess

_SECONDS: Final = 600.0
_LEAST_SECONDS: Final = 3.0
_NUM_ENVS: Final = 16
_NUM_WORKERS: Final = 4
_SERVER_ENVS: Final = 8
_KILL_SECONDS: Final = 1.0
_SERVER_KILL_SECONDS: Final = 20.0
_PAUSE_EVERY_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.3
_SAMPLE_SECONDS: Final = 1.0
#: Memory growth is measured between these time spans, as fractions of the duration.
_FROM: Final = (0.2, 0.25)
_TO: Final = (0.95, 1.0)
_MOST_GROWTH: Final = 2 << 20
_BAD_NETWORK: Final = NetworkFaults(
    duplicate=0.02, stale_copy=0.02, reorder=0.02, bytes_until_reset=2e6
)


@chaos_case(
    "all faults for ten minutes; a worker is killed each second, a server every 20 s",
    "no process grows by more than 2 MiB from minute 2 to 10; no resource is leaked",
    seconds=900.0,
)
def soak(trial: Trial) -> None:
    duration = max(_LEAST_SECONDS, _SECONDS * trial.scale)
    # Run briefly first, so that resources that are created once, at their first use, do
    # not count as leaks.
    _run(trial, MemorySamples(), 0.0)
    before = Leftovers.now()
    samples = MemorySamples()
    _run(trial, samples, duration)
    after = Leftovers.now(before)
    for name, growth in samples.growths(duration, _FROM, _TO).items():
        trial.result.check(f"growth of {name} in bytes", growth, _MOST_GROWTH)
    for name, (count_before, count_after) in before.compared_with(after).items():
        trial.result.check(f"{name} left", count_after - count_before, 0)


class _Setup(NamedTuple):
    """The batches and servers of a run.

    Attributes:
      local: Envs in local workers.
      remote: Envs at both servers.
      servers: The first server is only paused from time to time; the second is killed.
    """

    local: Driver
    remote: Driver
    servers: list[ServerProcess]

    def roles(self) -> dict[str, int]:
        roles = {"the trainer": os.getpid()}
        for name, server in zip(("steady", "killed"), self.servers, strict=True):
            roles[f"the {name} server"] = server.process.pid
        return roles


@contextlib.contextmanager
def _start(trial: Trial) -> Iterator[_Setup]:
    failures = {**failure_actions(DEADLY), "raise": {"probability": 0.0002}}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        # The proxies parse messages, so encryption is off.
        no_keys = "--insecure-no-auth"
        servers = enter(running_servers(trial, 2, _SERVER_ENVS, no_keys))
        proxies = [enter(Proxy(s.address, seed=trial.seed)) for s in servers]
        local = enter(
            local_driver(
                trial, _NUM_ENVS, _NUM_WORKERS, env_kwargs={"failures": failures}
            )
        )
        addresses = [proxy.address for proxy in proxies]
        remote = enter(remote_driver(trial, addresses, 2 * _SERVER_ENVS, insecure=True))
        for proxy in proxies:
            proxy.change(to_server=_BAD_NETWORK, to_client=_BAD_NETWORK)
        yield _Setup(local, remote, servers)


def _run(trial: Trial, samples: MemorySamples, duration: float) -> None:
    """Step all envs for a duration, with faults of all kinds."""
    with (
        _start(trial) as setup,
        FaultInjector() as worker_injector,
        FaultInjector() as server_injector,
    ):
        local, remote, servers = setup
        killed = np.arange(_SERVER_ENVS, 2 * _SERVER_ENVS)
        killer = WorkerKiller(local, worker_injector, trial)
        began = time.monotonic()
        kills, server_kills = _Timer(_KILL_SECONDS), _Timer(_SERVER_KILL_SECONDS)
        pauses, samples_due = _Timer(_PAUSE_EVERY_SECONDS), _Timer(_SAMPLE_SECONDS)
        num_server_faults = 0
        # Continue until at least one fault has happened, even on a busy machine.
        while (elapsed := time.monotonic() - began) < duration or (
            duration and not trial.result.faults
        ):
            actions = local.draw()
            if kills.is_due(elapsed) and killer.kill_random_worker(actions):
                kills.advance()
            if server_kills.is_due(elapsed):
                server_kills.advance()
                kill = functools.partial(kill_and_restart, servers[1], remote, killed)
                server_injector.inject(0.0, kill)
                num_server_faults += 1
            if pauses.is_due(elapsed):
                pauses.advance()
                server_injector.inject(0.0, functools.partial(_pause, servers[0]))
                num_server_faults += 1
            if samples_due.is_due(elapsed):
                samples_due.advance()
                samples.take(elapsed, setup.roles())
            local.step(actions)
            remote.step()
            trial.result.faults = killer.num_kills + num_server_faults
        while killer.has_pending_kill:
            local.step()
        local.settle()
        remote.settle()


class _Timer:
    """A timer that is due periodically, for the first time after one period."""

    def __init__(self, period_seconds: float) -> None:
        self._period = period_seconds
        self._due_at = period_seconds

    def is_due(self, elapsed: float) -> bool:
        return elapsed >= self._due_at

    def advance(self) -> None:
        self._due_at += self._period


def _pause(server: ServerProcess) -> None:
    server.signal(signal.SIGSTOP)
    time.sleep(_PAUSE_SECONDS)
    server.signal(signal.SIGCONT)
