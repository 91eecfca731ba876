"""Train CartPole while workers are killed every second, and servers now and then.

    python scripts/train_under_fire.py [--seed 0] [--servers 2]

Prints what it cost, and exits with 1 if the agent has not learned the task. Needs the
extra `dev`, for psutil.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab.processes import kill_all, with_descendants
from benchmarks.lab.servers import start_command
from ppo.commands.shared import start_tensorflow
from ppo.config import Config
from ppo.configs import CONFIGS
from ppo.run_folder.folder import RunFolder

GOAL = 475.0  # mean return of 100 evaluation episodes
STEPS = 150_000
WORKER_SECONDS = 1.0
FIRST_SERVER_SECONDS = 5.0  # else a quick machine has learned before it happens
SERVER_SECONDS = 20.0


class Servers:
    """Servers that are killed, and started again where they were."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"tcp://127.0.0.1:{_free_port()}" for _ in range(count)]
        self._processes = [self._start(address) for address in self.addresses]
        self.num_server_kills = self.num_worker_kills = 0

    def kill_worker(self) -> None:
        """Kills one worker of one server."""
        """Kills one worker of one server."""
        # A server's children are its template process; that one's are the workers.
        server = random.choice(self._processes)
        workers = with_descendants(server.pid)[2:]
        if workers:
            os.kill(random.choice(workers), signal.SIGKILL)
            self.num_worker_kills += 1

    def kill_server(self) -> None:
        """Kills one server, and starts it again."""
        """Kills one server, and starts it again."""
        index = random.randrange(len(self._processes))
        self._processes[index].kill()
        self._processes[index].wait()
        self._processes[index] = self._start(self.addresses[index])
        self.num_server_kills += 1

    def stop(self) -> None:
        """Ends all, with their workers."""
        """Ends all, with their workers."""
        for process in self._processes:
            kill_all(with_descendants(process.pid))
            process.wait()

    @staticmethod
    def _start(address: str) -> subprocess.Popen[bytes]:
        command = start_command("--workers", "1", "--bind", address)
        return subprocess.Popen(
            [*command, "--log-level", "error"], stdout=subprocess.DEVNULL
        )


@contextlib.contextmanager
def under_fire(servers: Servers) -> Iterator[None]:
    """Kills until the end of the block."""
    is_over = threading.Event()

    def fire() -> None:
        next_server = time.monotonic() + FIRST_SERVER_SECONDS
        while not is_over.wait(WORKER_SECONDS):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                servers.kill_worker()
            if time.monotonic() >= next_server:
                servers.kill_server()
                next_server += SERVER_SECONDS

    thread = threading.Thread(target=fire)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def train_once(config: Config, servers: Servers, console: Console) -> float:
    """Returns the mean return of the evaluation that follows."""
    from ppo.environments import env_maker
    from ppo.evaluate import evaluate_run
    from ppo.train import train

    make_env = env_maker(config, addresses=servers.addresses)
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder.create(Path(folder), config)
        started = time.perf_counter()
        with under_fire(servers):
            result = train(config, run_folder, make_env)
        seconds = time.perf_counter() - started
        evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    console.print(
        f"seed {config.seed}: {servers.num_worker_kills} workers and "
        f"{servers.num_server_kills} servers killed in {seconds:.0f} s; "
        f"{result.steps:,} steps learned from, {result.lost_steps:,} masked; "
        f"return {evaluation.mean_return:.1f} over {len(evaluation.returns)} episodes"
    )
    return evaluation.mean_return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(
    seed: Annotated[list[int] | None, typer.Option(help="Default: 0, 1, 2.")] = None,
    servers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    start_tensorflow(1, 1)
    console = Console()
    config = CONFIGS["cartpole"].replace(total_steps=STEPS)
    has_missed = False
    for number in seed or (0, 1, 2):
        hosts = Servers(servers)
        try:
            mean = train_once(config.replace(seed=number), hosts, console)
        finally:
            hosts.stop()
        has_missed |= mean < GOAL
    raise typer.Exit(1 if has_missed else 0)


if __name__ == "__main__":
    typer.run(main)
