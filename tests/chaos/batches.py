"""Batches of ledgers for a trial: in this process, or at servers that can be killed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from envserve.client import BatchEnv
from tests.chaos.driver import Driver
from tests.chaos.envs import LEDGER, MODULE
from tests.chaos.trial import Trial
from tests.envserve.server_process import ServerProcess
from tests.oracle.ledger import Ledger
from tests.oracle.player import LONGEST_CALL

#: Steps of an episode: short, since the ends of episodes are where things go wrong.
EPISODE: Final = 10
_KWARGS: Final = (
    *("length", "journal", "breakdowns", "step_seconds"),
    *("most_reset_seconds", "broken_by"),
)


def local_driver(
    trial: Trial, num_envs: int, num_workers: int, **options: Any
) -> contextlib.AbstractContextManager[Driver]:
    """Returns a driver of ledgers in workers of this process.

    Args:
      options: Of `_driver`, and more of `BatchEnv.local`.
    """

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
    """Returns a driver of ledgers at servers; `options` as of `BatchEnv.connect`."""

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
    longest_call: float = LONGEST_CALL,
    **options: Any,
) -> Iterator[Driver]:
    """Gives a driver, and audits the journal of its envs in the end.

    Args:
      env_kwargs: More arguments of `ChaosLedgerEnv`.
      options: More for `make`.
    """
    seed, journal = trial.draw_seed(), trial.new_folder("journal")
    ledger = Ledger(num_envs, seed, length=length)
    kwargs = {"length": length, "journal": str(journal), **(env_kwargs or {})}
    with (
        make(seed=seed, env_kwargs=kwargs, **options) as batch,
        Driver(trial, batch, ledger, longest_call) as driver,
    ):
        yield driver
    # Only now: until the workers have ended, they may go on to write.
    ledger.finish(journal)


@contextlib.contextmanager
def running_servers(
    trial: Trial, count: int, num_envs: int, *options: str
) -> Iterator[list[ServerProcess]]:
    """Gives servers that are ready, and kills them.

    Args:
      num_envs: How many envs each has, all its clients together.
      options: More options of `envserve start`.
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
    """Starts one, of which nobody knows whether it is ready."""
    folder = trial.new_folder("server")
    return ServerProcess(
        folder,
        *("--env", LEDGER, "--import", MODULE, "--log-level", "info"),
        *("--workers", "2", "--envs-per-worker", str(-(-num_envs // 2))),
        *("--max-processes", str(2 * num_envs)),  # each env may have a lease
        *("--crash-dir", str(folder / "crashes")),
        *(part for name in _KWARGS for part in ("--allow-kwarg", f"{name}:any")),
        *options,
        waits_until_ready=False,
    )
