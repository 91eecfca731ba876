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
from envserve.bench.load import Load, make_env, summary

__all__ = ["bare_loops"]


@contextlib.contextmanager
def bare_loops(load: Load) -> Iterator[Measure]:
    """Steps each process's share of the envs, with the same actions as the others.

    A batch step here is one round over all envs of a process.
    """
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
        "steps_per_second": sum(result["steps_per_second"] for result in results),
        **{name: float(np.mean([r[name] for r in results])) for name in names},
    }


def _step_alone(load: Load, start: int, stop: int, connection: Connection) -> None:
    envs = [make_env(load, disable_env_checker=True) for _ in range(start, stop)]
    for index, env in enumerate(envs):
        env.reset(seed=start + index)
    # Rows are cut out beforehand, Discrete actions are NumPy integers as elsewhere.
    rounds = itertools.cycle(
        [list(zip(envs, batch[start:stop], strict=True)) for batch in load.actions()]
    )
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while connection.recv():
            connection.send(summary(_run(rounds, load.seconds), stop - start))


def _run(
    rounds: Iterator[list[tuple[Any, Any]]], seconds: float
) -> np.ndarray[Any, Any]:
    clock = time.perf_counter
    instants = [clock()]
    deadline = instants[0] + seconds
    for pairs in rounds:
        for env, action in pairs:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        instants.append(clock())
        if instants[-1] >= deadline:
            break
    return np.diff(instants)
