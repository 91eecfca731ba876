"""An `envserve start` process, with its addresses, log and resources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import zmq

from benchmarks.support.processes import kill_all, usage_of, with_descendants
from envserve.client.link.sessionless_requests import request_welcome
from envserve.keys.key_folder import KeyFolder
from envserve.settings import PoolSettings
from envserve.wire.handshake import Welcome
from envserve.wire.sockets import use_keys
from tests.oracle.probe_envs import MODULE

LEDGER = "envserve/Ledger-v0"
#: Options for a server of ledger envs with journals.
LEDGER_OPTIONS = ("--allow-kwarg", "journal:any", "--allow-kwarg", "length")
#: Python arguments that run `envserve`.
PROGRAM = ("-m", "envserve")
#: Folder from which Python can import `tests`.
ROOT = Path(__file__).resolve().parents[2]
#: Maximum seconds for a server to exit, even on a machine that stalls.
_END_SECONDS = 40.0


def make_config(
    env_name: str = LEDGER, num_envs: int = 4, **changes: object
) -> PoolSettings:
    arguments: dict[str, object] = {
        "env_name": env_name,
        "num_envs": num_envs,
        "num_workers": 1,
        "seed": 3,
    }
    return PoolSettings(**{**arguments, **changes})  # type: ignore[arg-type]


def command(*options: str, program: Sequence[str] = PROGRAM) -> list[str]:
    return [sys.executable, *program, "start", *options]


def use_user_keys(socket: zmq.Socket[bytes], address: str) -> None:
    """Configure a socket with this user's keys for an address."""
    keys = KeyFolder().keys_for(address)
    assert keys is not None
    use_keys(socket, *keys)


class ServerProcess:
    """A server process, which is killed when the context ends.

    Attributes:
      addresses: The addresses that the server listens at, once it is ready.
      ready_line: The line that the server prints when it is ready.
      is_insecure: Whether the server runs without keys.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        bind: tuple[str, ...] = ("tcp://127.0.0.1:0",),
        cwd: Path | None = ROOT,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        prefix: Sequence[str] = (),
        imports: Sequence[str] = (MODULE,),
        waits_until_ready: bool = True,
    ) -> None:
        """Start `prefix python program start options`.

        Args:
          folder: Folder for the server's address file.
          *options: Options for `envserve start`.
          bind: Addresses to listen on.
          cwd: Working directory.
          environment: Environment variables to add to those of this process.
          program: Python arguments that run `envserve`.
          prefix: Command, with arguments, that runs Python.
          imports: Modules to import.
          waits_until_ready: Whether to call `wait_until_ready`.
        """
        modules = [part for name in imports for part in ("--import", name)]
        self._command = [*prefix, *command(*modules, "--workers", "2", program=program)]
        self._command += options
        self.is_insecure = "--insecure-no-auth" in options
        self._address_file = folder / "addresses"
        self._cwd, self._environment = cwd, environment or {}
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115
        self.addresses: list[str] = []
        self.ready_line = ""
        self.process = self._start(bind)
        if waits_until_ready:
            try:
                self.wait_until_ready()
            except RuntimeError:
                self.__exit__()
                raise

    def _start(self, addresses: Sequence[str]) -> subprocess.Popen[str]:
        binds = [part for address in addresses for part in ("--bind", address)]
        file = ("--address-file", str(self._address_file))
        return subprocess.Popen(
            [*self._command, *binds, *file],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._cwd,
            env={**os.environ, **self._environment},
        )

    def wait_until_ready(self) -> None:
        """Wait until the server is ready; raise RuntimeError if it exits."""
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        if not self.ready_line:
            raise RuntimeError(
                f"expected the server to become ready, but it exited with code "
                f"{self.process.wait()}:\n{self.log[-2000:]}"
            )
        self.addresses = self._address_file.read_text().split()

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def log(self) -> str:
        """The server's stderr so far."""
        self._log.seek(0)
        return self._log.read()

    @property
    def metrics_address(self) -> str:
        return self.log.rpartition("metrics are at ")[2].split()[0]

    @property
    def worker_pids(self) -> list[int]:
        """The pids of the workers, which the template process has forked."""
        return with_descendants(self.process.pid)[2:]

    @property
    def resident_bytes(self) -> int:
        """The server process's resident memory in bytes."""
        usage = usage_of(self.process.pid)
        assert usage is not None
        return usage.resident_bytes

    def welcome(self) -> Welcome:
        return request_welcome(self.address, 20.0, insecure=self.is_insecure)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the server, and wait until it has exited."""
        self.process.kill()
        self.wait()

    def restart(self) -> None:
        """Start the server again at its addresses; do not wait until it is ready."""
        self.process = self._start(self.addresses)

    def wait(self) -> int:
        """Wait for the exit, killing processes at the time limit; return the code."""
        processes = with_descendants(self.process.pid)
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_all(processes)
            return self.process.wait()
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def end(self, number: int | None = None) -> str:
        """Send a signal, if given; wait for the exit, and return the log."""
        if number is not None:
            self.signal(number)
        code = self.process.wait(_END_SECONDS)
        assert number is None or code == 0, self.log
        return self.log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.kill()
        self._log.close()
