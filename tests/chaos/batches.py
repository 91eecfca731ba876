"""Batches of ledger envs for trials: in local workers, or on servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from envserve.client import BatchEnv
from tests.chaos.driver import Driver
from tests.chaos.trial import Trial
from tests.envserve.server_process import ServerProcess
from tests.oracle.batch_driver import MAX_CALL_SECONDS
from tests.oracle.ledger import Ledger
from tests.oracle.probe_envs import MODULE

LEDGER: Final = "envserve/ChaosLedger-v0"
#: Number of steps in an episode: few, because most bugs occur when episodes end.
EPISODE: Final = 10
_KWARGS: Final = (
    *("length", "journal", "failures"),
    *("max_reset_seconds", "failure_flag"),
)


def local_driver(
    trial: Trial, num_envs: int, num_workers: int, **options: Any
) -> contextlib.AbstractContextManager[Driver]:
    """Return a driver for envs in local workers; see `_driver` for the options."""

    def make(**more: Any) -> BatchEnv:
        return BatchEnv.local(
            LEDGER,
            num_envs,
            num_workers,
            import_modules=[MODULE],
            crash_dir=str(trial.folder / "crashes"),
            **more,
        )

    return _driver(trial, num_envs, make, **options)


def remote_driver(
    trial: Trial, addresses: Sequence[str], num_envs: int, **options: Any
) -> contextlib.AbstractContextManager[Driver]:
    """Return a driver for envs on servers; `options` are for `BatchEnv.connect`."""

    def make(**more: Any) -> BatchEnv:
        return BatchEnv.connect(LEDGER, addresses, num_envs, **more)

    return _driver(trial, num_envs, make, **options)


@contextlib.contextmanager
def _driver(
    trial: Trial,
    num_envs: int,
    make: Callable[..., BatchEnv],
    *,
    length: int = EPISODE,
    env_kwargs: dict[str, Any] | None = None,
    max_call_seconds: float = MAX_CALL_SECONDS,
    **options: Any,
) -> Iterator[Driver]:
    """Provide a driver, and verify its envs' journal at the end.

    Args:
      env_kwargs: Additional arguments of `ChaosLedgerEnv`.
      options: Additional arguments of `make`.
    """
    seed, journal = trial.draw_seed(), trial.new_folder("journal")
    ledger = Ledger(num_envs, seed, length=length)
    kwargs = {"length": length, "journal": str(journal), **(env_kwargs or {})}
    with (
        make(seed=seed, env_kwargs=kwargs, **options) as batch,
        Driver(trial, batch, ledger, max_call_seconds) as driver,
    ):
        yield driver
    # The journal is complete only now, because workers step envs until they exit.
    ledger.finish(journal)


@contextlib.contextmanager
def running_servers(
    trial: Trial, count: int, num_envs: int, *options: str
) -> Iterator[list[ServerProcess]]:
    """Start servers, wait until they are ready, and kill them at the end.

    Args:
      num_envs: Capacity of each server.
      options: Additional options of `envserve start`.
    """
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running_server(trial, num_envs, *options))
            for _ in range(count)
        ]
        for server in servers:
            server.wait_until_ready()
        yield servers


def running_server(trial: Trial, num_envs: int, *options: str) -> ServerProcess:
    """Start a server without waiting until it is ready."""
    folder = trial.new_folder("server")
    return ServerProcess(
        folder,
        *("--env", LEDGER, "--import", MODULE, "--log-level", "info"),
        *("--workers", "2", "--envs-per-worker", str(-(-num_envs // 2))),
        *("--max-processes", str(2 * num_envs)),  # each env may be in its own lease
        *("--crash-dir", str(folder / "crashes")),
        *(part for name in _KWARGS for part in ("--allow-kwarg", f"{name}:any")),
        *options,
        waits_until_ready=False,
    )
