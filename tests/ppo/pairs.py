"""Two learners as processes of this host, forked off one that has loaded TensorFlow."""

import contextlib
import json
import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ppo.loaded"])


def told(num_learners: int = 2) -> list[str]:
    """Return what TF_CONFIG has to be for each."""
    workers = [f"127.0.0.1:{port}" for port in _free_ports(num_learners)]
    tasks = [{"type": "worker", "index": index} for index in range(num_learners)]
    cluster = {"worker": workers}
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


@contextlib.contextmanager
def started(
    function: Callable[..., object], arguments: Sequence[Sequence[object]], folder: Path
) -> Iterator[list[ForkServerProcess]]:
    """Start a process each, of a function; what they say goes to FOLDER/said-INDEX."""
    with contextlib.ExitStack() as stack:
        processes = []
        configs = told(len(arguments))
        for index, (each, text) in enumerate(zip(arguments, configs, strict=True)):
            path = str(folder / f"said-{index}")
            process = _CONTEXT.Process(target=_learn, args=(path, text, function, each))
            process.start()
            stack.callback(_end, process)
            processes.append(process)
        yield processes


def _learn(
    path: str, text: str, function: Callable[..., object], arguments: Sequence[object]
) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {"TF_CONFIG": text, "CUDA_VISIBLE_DEVICES": ""}
    function(*arguments)


def end_code(process: ForkServerProcess, seconds: float = 280) -> int | None:
    """Wait for its end; returns the exit code, or None after so long."""
    process.join(seconds)
    return process.exitcode


def said(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("said-*"))]


def _end(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


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
