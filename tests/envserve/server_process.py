"""An `envserve start` process for tests, and what to know about it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from envserve.client.connection import ask_welcome
from envserve.lane import PoolConfig
from envserve.wire import Welcome

LEDGER = "envserve/Ledger-v0"
#: What Python is told to run.
PROGRAM = ("-m", "envserve.cli")


def make_config(
    env_name: str = LEDGER, num_envs: int = 4, **changes: object
) -> PoolConfig:
    arguments: dict[str, object] = {
        "env_name": env_name,
        "num_envs": num_envs,
        "num_workers": 1,
        "seed": 3,
    }
    return PoolConfig(**{**arguments, **changes})  # type: ignore[arg-type]


def command(*options: str, program: Sequence[str] = PROGRAM) -> list[str]:
    return [sys.executable, *program, "start", *options]


class ServerProcess:
    """A server that has said that it is ready; killed at the end if it still runs.

    Attributes:
      process: The process.
      addresses: Its real addresses.
      ready_line: What it printed.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        bind: tuple[str, ...] = (),
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        prefix: Sequence[str] = (),
    ) -> None:
        address_file = folder / "addresses"
        binds = bind or ("tcp://127.0.0.1:0",)
        self.process = subprocess.Popen(
            [
                *prefix,
                *command(
                    *("--import", "envserve.testing", "--workers", "2"), program=program
                ),
                *(part for address in binds for part in ("--bind", address)),
                *("--address-file", str(address_file)),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        assert self.ready_line, self.end()
        self.addresses = address_file.read_text().split()

    @property
    def address(self) -> str:
        return self.addresses[0]

    def welcome(self) -> Welcome:
        return ask_welcome(self.address, 5.0)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> str:
        """Waits for the end of the process; returns its log."""
        self.process.wait(timeout=10)
        self._reader.join()
        return "".join(self._log)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
