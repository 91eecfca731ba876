"""Env servers for a benchmark: processes of `envserve start`."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from envserve.bench.load import Load
from envserve.lab.servers import start_command

__all__ = ["running_server"]

_STOP_SECONDS: Final = 10.0


@contextlib.contextmanager
def running_server(
    load: Load, num_envs: int, workers: int, bind: str, options: Sequence[str] = ()
) -> Iterator[str]:
    """Runs a server; gives its address once it is ready.

    Args:
      load: Says which env to offer.
      num_envs: How many of them.
      workers: Worker processes.
      bind: Where to listen; "{folder}" stands for a temporary folder.
      options: More options of `envserve start`.
    """
    with tempfile.TemporaryDirectory() as folder:
        addresses = Path(folder, "addresses")
        command = start_command(
            *("--env", load.env_name, "--workers", str(workers)),
            *("--envs-per-worker", str(-(-num_envs // workers))),
            *("--bind", bind.format(folder=folder), "--address-file", str(addresses)),
            *("--log-level", "warning", "--drain-grace", "0"),
            *(part for name in load.import_modules for part in ("--import", name)),
            *(part for name in load.env_kwargs for part in ("--allow-kwarg", name)),
            *options,
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                if not process.stdout.readline():
                    raise RuntimeError(
                        f"expected a server to get ready, but it ended with exit code "
                        f"{process.wait()}: {' '.join(command)}"
                    )
                yield addresses.read_text().split()[0]
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
