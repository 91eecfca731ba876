"""Start learners as local processes, forked from one that has loaded TensorFlow."""

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
_CONTEXT.set_forkserver_preload(["tests.ppo.preload"])


def tf_configs(num_learners: int = 2) -> list[str]:
    """Return the value of TF_CONFIG for each learner, with free ports."""
    workers = [f"127.0.0.1:{port}" for port in _free_ports(num_learners)]
    tasks = [{"type": "worker", "index": index} for index in range(num_learners)]
    cluster = {"worker": workers}
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


@contextlib.contextmanager
def started_learners(
    function: Callable[..., object],
    arguments: Sequence[Sequence[object]],
    folder: Path,
    num_missing: int = 0,
) -> Iterator[list[ForkServerProcess]]:
    """Call a function in one process per learner, which writes FOLDER/learner-INDEX.

    TF_CONFIG lists `num_missing` further learners, which are not started.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        configs = tf_configs(len(arguments) + num_missing)
        for index, (each, text) in enumerate(zip(arguments, configs, strict=False)):
            path = str(folder / f"learner-{index}")
            process = _CONTEXT.Process(
                target=_run_learner, args=(path, text, function, each)
            )
            process.start()
            stack.callback(_kill, process)
            processes.append(process)
        yield processes


def exit_codes(
    function: Callable[..., object],
    arguments: Sequence[Sequence[object]],
    folder: Path,
    seconds: float = 280,
) -> list[int | None]:
    """Start learners, wait for each, and return their exit codes."""
    with started_learners(function, arguments, folder) as processes:
        return [wait_for_exit(process, seconds) for process in processes]


def _run_learner(
    path: str, text: str, function: Callable[..., object], arguments: Sequence[object]
) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {"TF_CONFIG": text, "CUDA_VISIBLE_DEVICES": ""}
    function(*arguments)


def eager_main(arguments: Sequence[str]) -> None:
    """Run `ppo` without tracing, which takes longer than a few small updates."""
    import tensorflow as tf

    from ppo.cli.app import main

    tf.config.run_functions_eagerly(True)
    main(arguments)


def wait_for_exit(process: ForkServerProcess, seconds: float = 280) -> int | None:
    """Wait for a process, and return its exit code, or None after `seconds`."""
    process.join(seconds)
    return process.exitcode


def outputs(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("learner-*"))]


def _kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


def _free_ports(count: int) -> list[int]:
    """Return free ports below the range from which the system assigns ports.

    TensorFlow cannot choose ports itself, and it listens on all addresses.
    """
    draw = random.Random(os.getpid())
    ports: list[int] = []
    while len(ports) < count:
        port = draw.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
    return ports
