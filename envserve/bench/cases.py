"""The cases of `envserve bench`: context managers that yield a `Measure` function."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector.utils import iterate

from envserve.bench.interleaved import SPEED, Measure, make_measure
from envserve.bench.workload import Workload
from envserve.client import BatchEnv
from envserve.envs.registry import import_env_modules, make_env
from envserve.errors import EnvError, ServerError
from envserve.python_process import main_command, search_path
from envserve.wire.sockets import socket_folder

#: Maps each transport to the addresses on which servers listen. "{folder}" is replaced
#: with a temporary folder.
BINDS: Final = {"ipc": ("ipc://{folder}/envs",), "tcp": ("tcp://127.0.0.1:0",)}
#: Maximum time for the bare loops to exit before they are killed.
_CLOSE_SECONDS: Final = 1.0


@contextlib.contextmanager
def bare_loops(load: Workload) -> Iterator[Measure]:
    """Yield a function that measures the upper limit: processes that only step envs.

    There is one process per worker. Each process steps its share of the envs in a loop,
    with the same actions as the other cases. One pass over all envs of a process counts
    as a batch step.

    Raises:
      EnvError: An env failed, here or during a measurement.
    """
    load.check()
    context = multiprocessing.get_context("spawn")
    connections = []
    with contextlib.ExitStack() as stack:
        for rows in np.array_split(np.arange(load.num_envs), load.num_workers):
            parent_end, child_end = context.Pipe()
            arguments = (load, rows.tolist(), child_end)
            process = context.Process(target=_step_in_process, args=arguments)
            with _sigint_blocked():
                process.start()
            child_end.close()
            # Callbacks run in reverse order: first, closing the pipe makes the process
            # exit, unless it imports modules, or processes that inherit the pipe run.
            stack.callback(process.kill)
            stack.callback(process.join, _CLOSE_SECONDS)
            stack.callback(parent_end.close)
            connections.append(parent_end)
        for connection in connections:
            _receive(connection)  # "ready", once the process has built its envs
        yield lambda: _measure_all(connections)


def _measure_all(connections: Sequence[Connection]) -> Mapping[str, float]:
    for connection in connections:
        connection.send("measure")
    results: list[dict[str, float]] = [*map(_receive, connections)]
    means = {name: float(np.mean([r[name] for r in results])) for name in results[0]}
    return {**means, SPEED: sum(result[SPEED] for result in results)}


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise EnvError(
            "an env raised an exception (see the traceback above) or ended its "
            "process; expected an env that does not fail during the measurement"
        ) from None


def _step_in_process(load: Workload, rows: list[int], connection: Connection) -> None:
    import_env_modules(load.import_modules)
    # Omit Gymnasium's wrappers, as envserve's workers do; otherwise, the workers could
    # be faster than the bare loops.
    envs = [make_env(load.env_name, load.env_kwargs) for _ in rows]
    for row, env in zip(rows, envs, strict=True):
        env.reset(seed=row)
    # Split the actions and look up the methods in advance, so that only the envs are
    # measured.
    steps, resets = [env.step for env in envs], [env.reset for env in envs]
    space, rounds = load.action_space(), []
    for batch in load.actions():
        actions = list(iterate(space, batch))
        share = [actions[row] for row in rows]
        rounds.append(list(zip(steps, resets, share, strict=True)))

    def step_all(one_round: list[tuple[Any, Any, Any]]) -> None:
        for step, reset, action in one_round:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()

    measure = make_measure(step_all, rounds, replace(load, num_envs=len(rows)))
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send("ready")
        while connection.recv():
            connection.send(measure())


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in the processes that are started in the context.

    On Ctrl-C, a terminal sends SIGINT to all processes of the command, and this process
    ends the others.
    """
    # When multiprocessing starts its resource tracker, it unblocks SIGINT.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def vector_env(load: Workload, kind: str) -> Iterator[Measure]:
    """Yield a function that measures Gymnasium's SyncVectorEnv or AsyncVectorEnv."""
    with _sigint_blocked():
        envs = getattr(gymnasium.vector, kind)(load.env_functions())
    try:
        envs.reset(seed=0)
        yield make_measure(envs.step, load.actions(), load)
    except BaseException:
        # After Ctrl-C, `close` of AsyncVectorEnv would wait for the results of a step,
        # forever if it had received them.
        for process in getattr(envs, "processes", ()):
            process.kill()
        envs.closed = True
        raise
    finally:
        envs.close()


@contextlib.contextmanager
def stepping_batch_env(load: Workload, binds: Sequence[str] = ()) -> Iterator[Measure]:
    """Yield a function that measures a `BatchEnv`; for arguments, see `batch_env`."""
    with batch_env(load, binds) as batch:
        yield make_measure(batch.step, load.actions(), load)


@contextlib.contextmanager
def batch_env(
    load: Workload,
    binds: Sequence[str] = (),
    server_options: Sequence[str] = (),
    **options: Any,
) -> Iterator[BatchEnv]:
    """Yield a `BatchEnv` that has been reset.

    Args:
      load: Envs and number of workers.
      binds: Addresses on which to start servers, each with an equal share of the envs
        and workers; if empty, the envs run in workers of this process.
      server_options: Additional options of `envserve start`.
      options: Additional arguments of `BatchEnv.local` or `BatchEnv.connect`.
    """
    name, num_envs = load.env_name, load.num_envs
    options |= {"seed": 0, "env_kwargs": load.env_kwargs}
    with contextlib.ExitStack() as stack:
        if binds:
            share = replace(
                load,
                num_envs=-(-num_envs // len(binds)),
                num_workers=-(-load.num_workers // len(binds)),
            )
            servers = [running_server(share, bind, server_options) for bind in binds]
            addresses = [stack.enter_context(server) for server in servers]
            batch = BatchEnv.connect(name, addresses, num_envs, **options)
        else:
            options["import_modules"] = load.import_modules
            batch = BatchEnv.local(name, num_envs, load.num_workers, **options)
        stack.enter_context(batch)
        batch.reset()
        yield batch


@contextlib.contextmanager
def running_server(
    load: Workload, bind: str, options: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server, and yield its address once it is ready."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        command = main_command(
            "envserve.__main__",
            *("start", "--env", load.env_name),
            *("--workers", str(load.num_workers), "--bind", bind.format(folder=folder)),
            *("--envs-per-worker", str(-(-load.num_envs // load.num_workers))),
            *("--log-level", "warning", "--drain-grace", "0"),
            *(part for name in load.import_modules for part in ("--import", name)),
            *(f"--allow-kwarg={name}:any" for name in load.env_kwargs),
            *options,
            path=search_path(),  # so that the server finds the `--import` modules
            ends_with_parent=True,
        )
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.enter_context(server)
        stack.callback(server.terminate)
        assert server.stdout is not None
        ready = server.stdout.readline()
        if not ready:
            raise ServerError(f"the server did not start: {' '.join(command)}")
        # "envserve: ready on ADDRESS with ..."; a path may contain spaces.
        yield ready.removeprefix("envserve: ready on ").rpartition(" with ")[0]
