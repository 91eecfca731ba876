"""What is ours: a BatchEnv in-process, on a server over ipc or tcp, on two servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from envserve.bench.case_process import Case, Measure
from envserve.bench.load import Load, stepping
from envserve.bench.servers import running_server
from envserve.client import BatchEnv

__all__ = ["IN_PROCESS", "IPC", "TCP", "TWO_SERVERS", "our_batch", "our_cases"]

IN_PROCESS = "envserve in-process"
IPC = "envserve ipc"
TCP = "envserve tcp"
TWO_SERVERS = "envserve tcp, 2 servers"

_BINDS = {
    IN_PROCESS: (),
    IPC: ("ipc://{folder}/envs",),
    TCP: ("tcp://127.0.0.1:0",),
    TWO_SERVERS: ("tcp://127.0.0.1:0",) * 2,
}


@contextlib.contextmanager
def our_batch(
    load: Load,
    binds: tuple[str, ...],
    server_options: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[BatchEnv]:
    """Gives a batch that was reset.

    Args:
      load: Which envs, in how many workers.
      binds: Where servers are to listen, each with its share of the envs and the
        workers; with none, the envs run in workers of this process.
      server_options: More options of `envserve start`.
      options: More arguments of `BatchEnv.local` or `BatchEnv.connect`.
    """
    name, num_envs = load.env_name, load.num_envs
    options |= {"seed": 0, "env_kwargs": load.env_kwargs}
    with contextlib.ExitStack() as stack:
        if binds:
            shares = -(-num_envs // len(binds)), -(-load.workers // len(binds))
            addresses = [
                stack.enter_context(running_server(load, *shares, bind, server_options))
                for bind in binds
            ]
            batch = BatchEnv.connect(name, addresses, num_envs, **options)
        else:
            modules = load.import_modules
            batch = BatchEnv.local(
                name, num_envs, load.workers, import_modules=modules, **options
            )
        stack.enter_context(batch)
        batch.reset()
        yield batch


@contextlib.contextmanager
def our_stepping(load: Load, binds: tuple[str, ...]) -> Iterator[Measure]:
    """Steps all envs of a batch again and again."""
    with our_batch(load, binds) as batch:
        yield stepping(batch.step, load.actions(), load)


def our_cases(load: Load) -> list[Case]:
    """Returns a case for every way to reach the envs."""
    return [
        Case(name, our_stepping, {"load": load, "binds": binds})
        for name, binds in _BINDS.items()
        if len(binds) <= load.num_envs
    ]
