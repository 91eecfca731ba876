"""Batches of ledgers for a trial: in this process, or at servers that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from envserve.chaos.driver import LONGEST_CALL, Driver
from envserve.chaos.envs import LEDGER, MODULE
from envserve.chaos.trial import Trial
from envserve.client import BatchEnv
from envserve.lab.processes import kill_all, with_descendants
from envserve.lab.servers import start_command
from envserve.testing import Ledger

__all__ = ["EPISODE", "Server", "local_driver", "remote_driver", "running_servers"]

#: Steps of an episode: short, since the ends of episodes are where things go wrong.
EPISODE: Final = 10
_STOP_SECONDS: Final = 10.0
_KWARGS: Final = (
    *("length", "journal", "breakdowns", "step_seconds"),
    *("most_reset_seconds", "broken_by"),
)


@contextlib.contextmanager
def local_driver(
    trial: Trial,
    num_envs: int,
    num_workers: int,
    *,
    length: int = EPISODE,
    env_kwargs: dict[str, Any] | None = None,
    longest_call: float = LONGEST_CALL,
    **options: Any,
) -> Iterator[Driver]:
    """Gives a driver of ledgers in workers of this process; audits their journal.

    Args:
      trial: Gets what is counted.
      num_envs: Rows.
      num_workers: Processes.
      length: Steps of an episode.
      env_kwargs: More arguments of `ChaosLedgerEnv`.
      longest_call: Seconds that a call may take.
      options: More arguments of `BatchEnv.local`.
    """
    seed, journal = trial.draw_seed(), trial.new_folder("journal")
    ledger = Ledger(num_envs, seed, length=length)
    kwargs = {"length": length, "journal": str(journal), **(env_kwargs or {})}
    with (
        BatchEnv.local(
            LEDGER,
            num_envs,
            num_workers,
            seed=seed,
            env_kwargs=kwargs,
            import_modules=[MODULE],
            crash_dir=str(trial.folder / "crashes"),
            **options,
        ) as batch,
        Driver(trial, batch, ledger, longest_call) as driver,
    ):
        yield driver
    # Only now: until the workers have ended, they may go on to write.
    ledger.finish(journal)


@contextlib.contextmanager
def remote_driver(
    trial: Trial,
    addresses: Sequence[str],
    num_envs: int,
    *,
    length: int = EPISODE,
    env_kwargs: dict[str, Any] | None = None,
    longest_call: float = LONGEST_CALL,
    **options: Any,
) -> Iterator[Driver]:
    """Gives a driver of ledgers at servers; audits their journal.

    Arguments are those of `local_driver`; `options` are of `BatchEnv.connect`.
    """
    seed, journal = trial.draw_seed(), trial.new_folder("journal")
    ledger = Ledger(num_envs, seed, length=length)
    kwargs = {"length": length, "journal": str(journal), **(env_kwargs or {})}
    with (
        BatchEnv.connect(
            LEDGER, addresses, num_envs, seed=seed, env_kwargs=kwargs, **options
        ) as batch,
        Driver(trial, batch, ledger, longest_call) as driver,
    ):
        yield driver
    ledger.finish(journal)


@contextlib.contextmanager
def running_servers(
    trial: Trial, count: int, num_envs: int, *options: str
) -> Iterator[list[Server]]:
    """Gives servers that are ready, and stops them; arguments are those of `Server`."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(Server(trial, num_envs, *options)) for _ in range(count)
        ]
        for server in servers:
            server.wait_until_ready()
        yield servers


class Server:
    """An `envserve start` process that can be started again at the same address.

    Attributes:
      address: Where it listens.
      log: The file that its log goes to.
    """

    def __init__(self, trial: Trial, num_envs: int, *options: str) -> None:
        """Starts it; `wait_until_ready` waits for it.

        Args:
          trial: Has the folder for its files.
          num_envs: How many envs it has, all clients together.
          options: More options of `envserve start`.
        """
        folder = trial.new_folder("server")
        self.log = folder / "log"
        self._options = (
            *("--env", LEDGER, "--import", MODULE, "--log-level", "info"),
            *("--workers", "2", "--envs-per-worker", str(-(-num_envs // 2))),
            *("--crash-dir", str(folder / "crashes")),
            *(part for name in _KWARGS for part in ("--allow-kwarg", name)),
            *options,
        )
        self._addresses = folder / "addresses"
        self.address = ""
        self.process = self._spawn("tcp://127.0.0.1:0", self._addresses)

    def _spawn(
        self, bind: str, address_file: Path | None = None
    ) -> subprocess.Popen[str]:
        where = () if address_file is None else ("--address-file", str(address_file))
        command = start_command("--bind", bind, *where, *self._options)
        with self.log.open("a") as log:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait_until_ready(self) -> None:
        """Waits for its word that it is."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError(
                f"expected a server to get ready, but it ended with exit code "
                f"{self.process.wait()}:\n{self.log.read_text()[-2000:]}"
            )
        self.address = self.address or self._addresses.read_text().split()[0]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of what its template has forked."""
        ours = with_descendants(self.process.pid)
        return [pid for pid in ours[2:] if pid != self.process.pid]

    def signal(self, number: int) -> None:
        """Sends a signal to the server itself."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills it, and waits until it is gone."""
        self.process.kill()
        self.wait()

    def start_again(self) -> None:
        """Starts it at the same address, and does not wait until it is ready."""
        self.process = self._spawn(self.address)

    def stop(self) -> int:
        """Asks it to stop at once; returns its exit code."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Waits for its end; returns its exit code. What takes too long is killed."""
        ours = with_descendants(self.process.pid)
        try:
            return self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            kill_all(ours)
            return self.process.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it, if it is there."""
        if self.process.poll() is None:
            self.stop()
        elif self.process.stdout is not None:
            self.process.stdout.close()
