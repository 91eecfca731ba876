"""Two learners as processes of this host."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PPO = ("-c", "from ppo.cli import main; main()", "train")


def told(num_learners: int = 2) -> list[str]:
    """Return what TF_CONFIG has to be for each."""
    workers = [f"127.0.0.1:{port}" for port in _free_ports(num_learners)]
    tasks = [{"type": "worker", "index": index} for index in range(num_learners)]
    cluster = {"worker": workers}
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[object]], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a Python process each; what they say goes to FOLDER/said-INDEX."""
    with contextlib.ExitStack() as stack:
        processes = []
        configs = told(len(commands))
        for index, (command, text) in enumerate(zip(commands, configs, strict=True)):
            file = stack.enter_context((folder / f"said-{index}").open("wb"))
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**os.environ, "TF_CONFIG": text, "CUDA_VISIBLE_DEVICES": ""},
                stdout=file,
                stderr=file,
            )
            stack.callback(_end, process)
            processes.append(process)
        yield processes


def said(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("said-*"))]


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Find ports that nobody else is given: below those for port 0.

    TensorFlow has to be told before it listens, and then takes all addresses.
    """
    draw = random.Random(os.getpid())
    ports: list[int] = []
    while len(ports) < count:
        port = draw.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
    return ports
