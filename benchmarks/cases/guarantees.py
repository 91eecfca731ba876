"""`guarantees`: the cost of checks and fault tolerance, compared with a bare loop."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import socket
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import CORES, Repetitions, Run, Seconds, Workers, sub_command
from benchmarks.harness import Case
from benchmarks.result import median, ratio, spread
from envserve.bench.cases import stepping_batch_env
from envserve.bench.interleaved import SPEED, Measure, make_measure
from envserve.bench.workload import Workload
from envserve.envs.registry import make_env

BARE_SLAB, OURS = "bare slab", "BatchEnv.local"
_ENVS = ["HalfCheetah-v5", "CartPole-v1"]
_SIZES = [16, 64]


@sub_command
def guarantees(
    run: Run,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Registered name of an env; can be repeated."),
    ] = None,
    num_envs: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of envs in the batch; can be repeated."),
    ] = None,
    workers: Workers = CORES,
    seconds: Seconds = 0.6,
    repetitions: Repetitions = 5,
) -> None:
    """Compare BatchEnv with workers that have no checks and no fault tolerance."""
    cases = []
    for name in env or _ENVS:
        for size in num_envs or _SIZES:
            load = Workload(name, size, workers, seconds)
            load.check()
            work = {"load": load}
            cases += [
                Case(f"{name}, {size} envs: {BARE_SLAB}", bare_slab, work),
                Case(f"{name}, {size} envs: {OURS}", stepping_batch_env, work),
            ]
    run.publish(
        title=f"{workers} workers: env steps per second",
        measured=run.measure(cases, repetitions),
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "p50 us": median("p50_us"),
            "p99 us": median("p99_us"),
            f"/ {BARE_SLAB}": ratio(
                lambda case: f"{case.partition(':')[0]}: {BARE_SLAB}", SPEED
            ),
        },
        notes=[
            f"{BARE_SLAB}: forked workers that write rows to shared memory, with one "
            "byte over a socket pair in each direction. Results are copied. There are "
            "no checks, and there is no fault tolerance."
        ],
    )


@contextlib.contextmanager
def bare_slab(load: Workload) -> Iterator[Measure]:
    """Step envs in minimal workers that write their rows to shared memory."""
    env = make_env(load.env_name, load.env_kwargs)
    spaces: Any = env.observation_space, env.action_space
    env.close()
    size = load.num_envs
    observations, actions = (_shared([size, *s.shape], s.dtype) for s in spaces)
    rest = [_shared([size], dtype) for dtype in (np.float64, bool, bool)]
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        connections = []
        for rows in np.array_split(np.arange(load.num_envs), load.num_workers):
            connection, worker_end = socket.socketpair()
            arguments = load, rows.tolist(), actions, [observations, *rest], worker_end
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            stack.callback(worker.join)
            stack.callback(worker.terminate)
            connections.append(stack.enter_context(connection))
            worker_end.close()

        def step(batch: Any) -> list[Any]:
            actions[:] = batch
            for connection in connections:
                connection.send(b"s")
            for connection in connections:
                connection.recv(1)
            return [array.copy() for array in (observations, *rest)]

        yield make_measure(step, load.actions(), load)


def _work(
    load: Workload, rows: list[int], actions: Any, slab: list[Any], peer: socket.socket
) -> None:
    """Step the envs of `rows` once per byte received; write the results to `slab`."""
    observations, rewards, terminated, truncated = slab
    envs = [(row, make_env(load.env_name, load.env_kwargs)) for row in rows]
    for row, env in envs:
        env.reset(seed=row)
    while peer.recv(1):
        for row, env in envs:
            observation, rewards[row], ended, cut_off, _ = env.step(actions[row])
            terminated[row], truncated[row] = ended, cut_off
            observations[row] = env.reset()[0] if ended or cut_off else observation
        peer.send(b"d")


def _shared(shape: list[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an array that is shared with forked processes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
