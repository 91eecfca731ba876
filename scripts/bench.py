"""Raw stepping beside its peers, in one run: python scripts/bench.py --env CartPole-v1.

The limit is what as many processes as workers reach when each only steps its envs.
Machines are noisy, so the cases take turns, and what counts is their ratios.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import typer
from gymnasium.vector import AsyncVectorEnv
from rich.console import Console
from rich.table import Table

from envserve.client import BatchEnv

Case = Callable[[], float]


def step_alone(
    env_name: str, num_envs: int, seconds: float, start: Any, results: Any
) -> None:
    """Steps envs in this process with nothing in between."""
    envs = [gymnasium.make(env_name, disable_env_checker=True) for _ in range(num_envs)]
    for index, env in enumerate(envs):
        env.reset(seed=index)
    action = envs[0].action_space.sample()
    start.wait()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated:
                env.reset()
    results.put(steps / (time.perf_counter() - began))


def limit(env_name: str, num_envs: int, workers: int, seconds: float) -> float:
    """Returns the steps/s of bare loops in `workers` processes."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(workers), context.Queue()
    share = -(-num_envs // workers)
    arguments = (env_name, share, seconds, start, results)
    processes = [
        context.Process(target=step_alone, args=arguments) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    total = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def speed(step: Callable[[Any], Any], actions: Any, seconds: float) -> float:
    """Returns the env steps/s of a batched step."""
    for _ in range(20):
        step(actions)
    batches, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(actions)
        batches += 1
    return batches * len(actions) / (time.perf_counter() - began)


@contextlib.contextmanager
def server(env_name: str, workers: int, bind: str, folder: str) -> Iterator[str]:
    """Runs an env server; gives its address."""
    file = Path(folder) / "address"
    command = [sys.executable, "-m", "envserve.cli", "start", "--env", env_name]
    command += ["--workers", str(workers), "--envs-per-worker", "1024", "--bind", bind]
    command += ["--address-file", str(file), "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield file.read_text().split()[0]
        finally:
            process.terminate()


def cases(
    env_name: str, num_envs: int, workers: int, seconds: float
) -> dict[str, Case]:
    """Returns what to measure, by name."""
    space = gymnasium.make(env_name).action_space
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(num_envs)])

    def local() -> float:
        with BatchEnv.local(env_name, num_envs, workers, seed=0) as batch:
            batch.reset()
            return speed(batch.step, actions, seconds)

    def remote(bind: str) -> float:
        with (
            tempfile.TemporaryDirectory() as folder,
            server(env_name, workers, bind.format(folder), folder) as address,
            BatchEnv.connect(env_name, [address], num_envs, seed=0) as batch,
        ):
            batch.reset()
            return speed(batch.step, actions, seconds)

    def peer() -> float:
        envs = AsyncVectorEnv([lambda: gymnasium.make(env_name)] * num_envs)
        envs.reset(seed=0)
        try:
            return speed(envs.step, actions, seconds)
        finally:
            envs.close()

    return {
        "limit: bare loops": lambda: limit(env_name, num_envs, workers, seconds),
        "envserve, in-process": local,
        "envserve, ipc": lambda: remote("ipc://{}/envs"),
        "envserve, tcp": lambda: remote("tcp://127.0.0.1:0"),
        "gymnasium AsyncVectorEnv": peer,
    }


def main(
    env: Annotated[str, typer.Option(help="Registered name.")] = "HalfCheetah-v5",
    num_envs: Annotated[int, typer.Option(min=1)] = 16,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="Per measurement.")] = 3.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measure env steps per second, and print medians and ratios."""
    measured: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for name, case in cases(env, num_envs, workers, seconds).items():
            measured.setdefault(name, []).append(case())
    medians = {name: statistics.median(values) for name, values in measured.items()}
    table = Table("case", "steps/s (median)", "lowest - highest", "/ limit", "/ Async")
    for name, values in measured.items():
        table.add_row(
            name,
            f"{medians[name]:,.0f}",
            f"{min(values):,.0f} - {max(values):,.0f}",
            f"{medians[name] / medians['limit: bare loops']:.2f}",
            f"{medians[name] / medians['gymnasium AsyncVectorEnv']:.1f}",
        )
    Console().print(f"{env}, {num_envs} envs, {workers} workers", table)


if __name__ == "__main__":
    typer.run(main)
