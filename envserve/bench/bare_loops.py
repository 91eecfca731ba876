"""The machine's limit: as many processes as workers, which only step their envs."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from envserve.bench.case_process import Measure
from envserve.bench.load import SPEED, Load, summary
from envserve.registry import import_env_modules, make_env

__all__ = ["bare_loops"]

_Call = tuple[Any, Any, Any]


@contextlib.contextmanager
def bare_loops(load: Load) -> Iterator[Measure]:
    """Steps each process's share of the envs, with the same actions as the others.

    A batch step here is one round over all envs of a process.
    """
    # An env that cannot be built says so once, here, rather than in each process.
    import_env_modules(load.import_modules)
    make_env(load.env_name, load.env_kwargs).close()
    edges = [i * load.num_envs // load.workers for i in range(load.workers + 1)]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(load.workers)]
    processes = [
        context.Process(target=_step_alone, args=(load, start, stop, theirs))
        for start, stop, (_, theirs) in zip(edges, edges[1:], pipes, strict=False)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        for ours, _ in pipes:
            ours.recv()  # its envs are built
        yield lambda: _measure([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in processes:
            process.join()


def _measure(connections: list[Connection]) -> Mapping[str, float]:
    for connection in connections:
        connection.send("step")
    results: list[dict[str, float]] = [connection.recv() for connection in connections]
    names = ("p50_us", "p99_us")
    return {
        SPEED: sum(result[SPEED] for result in results),
        **{name: float(np.mean([r[name] for r in results])) for name in names},
    }


def _step_alone(load: Load, start: int, stop: int, connection: Connection) -> None:
    import_env_modules(load.import_modules)
    # As lean as in our workers, or it would be no limit.
    envs = [make_env(load.env_name, load.env_kwargs) for _ in range(start, stop)]
    for index, env in enumerate(envs):
        env.reset(seed=start + index)
    # Cut out beforehand: rows of actions, and what is looked up in an env.
    calls: list[tuple[Any, Any]] = [(env.step, env.reset) for env in envs]
    rounds = itertools.cycle(
        [
            [(*call, row) for call, row in zip(calls, batch[start:stop], strict=True)]
            for batch in load.actions()
        ]
    )
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while connection.recv():
            connection.send(summary(_run(rounds, load.seconds), stop - start))


def _run(rounds: Iterator[list[_Call]], seconds: float) -> np.ndarray[Any, Any]:
    clock = time.perf_counter
    instants = [clock()]
    deadline = instants[0] + seconds
    for calls in rounds:
        for step, reset, action in calls:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()
        instants.append(clock())
        if instants[-1] >= deadline:
            break
    return np.diff(instants)
