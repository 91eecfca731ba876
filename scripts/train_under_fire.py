"""Train CartPole while workers are killed every second, and servers now and then.

    python scripts/train_under_fire.py [--seed 0] [--servers 2]

Prints what it cost, and exits with 1 if the agent has not learned the task. Needs the
extra `dev`, for psutil.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppo.commands.shared import start_tensorflow
from ppo.config import Config
from ppo.configs import CONFIGS
from ppo.run_folder.folder import RunFolder
from tests.envserve.server_process import ServerProcess

GOAL = 475.0  # mean return of 100 evaluation episodes
STEPS = 150_000
WORKER_SECONDS = 1.0
FIRST_SERVER_SECONDS = 5.0  # else a quick machine has learned before it happens
SERVER_SECONDS = 20.0
OPTIONS = ("--workers", "1", "--log-level", "error")


@contextlib.contextmanager
def under_fire(servers: Sequence[ServerProcess]) -> Iterator[Counter[str]]:
    """Kills until the end of the block; gives how many of what."""
    is_over, killed = threading.Event(), Counter[str]()

    def fire() -> None:
        next_server = time.monotonic() + FIRST_SERVER_SECONDS
        while not is_over.wait(WORKER_SECONDS):
            if workers := random.choice(servers).worker_pids:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(random.choice(workers), signal.SIGKILL)
                    killed["workers"] += 1
            if time.monotonic() >= next_server:
                server = random.choice(servers)
                server.kill()
                server.start_again()
                killed["servers"] += 1
                next_server += SERVER_SECONDS

    thread = threading.Thread(target=fire)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def train_once(config: Config, num_servers: int, console: Console) -> float:
    """Returns the mean return of the evaluation that follows."""
    from ppo.environments import env_maker
    from ppo.evaluate import evaluate_run
    from ppo.train import train

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number in range(num_servers):
            (folder / str(number)).mkdir()
            server = ServerProcess(folder / str(number), *OPTIONS)
            servers.append(stack.enter_context(server))
        make_env = env_maker(config, addresses=[s.address for s in servers])
        run_folder = RunFolder.create(folder / "run", config)
        started = time.perf_counter()
        with under_fire(servers) as killed:
            result = train(config, run_folder, make_env)
        seconds = time.perf_counter() - started
        evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    console.print(
        f"seed {config.seed}: {killed['workers']} workers and "
        f"{killed['servers']} servers killed in {seconds:.0f} s; "
        f"{result.steps:,} steps learned from, {result.lost_steps:,} masked; "
        f"return {evaluation.mean_return:.1f} over {len(evaluation.returns)} episodes"
    )
    return evaluation.mean_return


def main(
    seed: Annotated[list[int] | None, typer.Option(help="Default: 0, 1, 2.")] = None,
    servers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    start_tensorflow(1, 1)
    console = Console()
    config = CONFIGS["cartpole"].replace(total_steps=STEPS)
    means = [
        train_once(config.replace(seed=n), servers, console) for n in seed or (0, 1, 2)
    ]
    raise typer.Exit(1 if min(means) < GOAL else 0)


if __name__ == "__main__":
    typer.run(main)
