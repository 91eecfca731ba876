"""Train CartPole while a worker is killed every second, and a server every 20 s.

    python scripts/train_with_failures.py [--seed 0] [--servers 2]
    python scripts/train_with_failures.py --leave --servers 4

With --leave, servers are not restarted: one server is killed, another is drained, and a
new server is added to the address file. A row whose server is running must be valid in
every batch step, except in the first step after its move to another server. Prints the
number of lost steps, and exits with 1 if the agent has not learned the task or, with
--leave, if another row was not valid. Requires the extra `dev` (psutil).
"""

import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envserve.client import BatchEnv, Status, StepResult
from ppo.cli.options import start_tensorflow
from ppo.config import Config
from ppo.config.named_configs import CONFIGS
from ppo.run_folder.folder import RunFolder
from tests.envserve.server_process import ServerProcess

GOAL = 475.0  # mean return of 100 evaluation episodes
STEPS = 150_000
WORKER_SECONDS = 1.0
FIRST_SERVER_SECONDS = 5.0  # short, so that training on a fast machine has not ended
SERVER_SECONDS = 20.0
OPTIONS = ("--workers", "1", "--log-level", "error")


@contextlib.contextmanager
def run_in_thread(
    change: Callable[[threading.Event, Counter[str]], None],
) -> Iterator[Counter[str]]:
    """Run `change` in a thread until the `with` block ends; yield its counts."""
    is_over, counts = threading.Event(), Counter[str]()
    thread = threading.Thread(target=change, args=(is_over, counts))
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()


def kill_repeatedly(
    servers: Sequence[ServerProcess], is_over: threading.Event, killed: Counter[str]
) -> None:
    """Kill workers and servers until `is_over` is set."""
    next_server = time.monotonic() + FIRST_SERVER_SECONDS
    while not is_over.wait(WORKER_SECONDS):
        if workers := random.choice(servers).worker_pids:
            with contextlib.suppress(ProcessLookupError):  # the worker has just exited
                os.kill(random.choice(workers), signal.SIGKILL)
                killed["workers killed"] += 1
        if time.monotonic() >= next_server:
            server = random.choice(servers)
            server.kill()
            server.restart()
            killed["servers killed"] += 1
            next_server += SERVER_SECONDS


def swap(
    servers: Sequence[ServerProcess],
    add: Callable[[], ServerProcess],
    left: set[str],
    is_over: threading.Event,
    done: Counter[str],
) -> None:
    """Kill one server, add one and drain one, unless `is_over` is set.

    The address of a server is added to `left` before it is killed or drained.
    """
    if not is_over.wait(FIRST_SERVER_SECONDS):
        left.add(servers[0].address)
        servers[0].kill()
        done["killed"] += 1
    if not is_over.wait(FIRST_SERVER_SECONDS):
        add()
        done["added"] += 1
        left.add(servers[1].address)
        servers[1].signal(signal.SIGTERM)
        done["drained"] += servers[1].wait() == 0


class RowCheck:
    """Counts rows that are not valid although their server is running.

    If a row's server has left, the row may be invalid until it has moved to another
    server. In the result that reports the move, the row may also be invalid.
    """

    def __init__(self) -> None:
        #: Addresses of servers that have been killed or drained.
        self.left: set[str] = set()
        self.num_steps = self.moved = self.missing = 0

    def watch(self, env: BatchEnv) -> BatchEnv:
        """Check all future results of a batch; return the batch."""
        lanes = [lane for lane in env.lanes for _ in range(lane.num_envs)]
        servers, recv = [lane.name for lane in lanes], env.recv

        def checked_recv(**kwargs: Any) -> tuple[Any, StepResult]:
            rows, result = recv(**kwargs)
            self.num_steps += 1
            for row, status in zip(
                rows[~result.valid], result.status[~result.valid], strict=True
            ):
                if servers[row] not in self.left:
                    self.missing += 1
                elif status == Status.SERVER_LOST:
                    self.moved += 1
                    servers[row] = lanes[row].name
            return rows, result

        vars(env)["recv"] = checked_recv  # training with splits calls `recv`
        return env


def train_once(
    config: Config, num_servers: int, console: Console, *, leave: bool
) -> float:
    """Return the mean return of the final evaluation, or -inf if rows were missing."""
    from ppo.environments import env_maker
    from ppo.evaluation.evaluate import evaluate_run
    from ppo.train import train

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: list[ServerProcess] = []
        address_file = folder / "servers"

        def add() -> ServerProcess:
            home = folder / f"server-{len(servers)}"
            home.mkdir()
            servers.append(stack.enter_context(ServerProcess(home, *OPTIONS)))
            address_file.write_text("\n".join(server.address for server in servers))
            return servers[-1]

        for _ in range(num_servers):
            add()
        make_env = env_maker(config, addresses=[f"file://{address_file}"])
        run_folder = RunFolder.create(folder / "run", config)
        check = RowCheck()

        def make_checked_env(**kwargs: Any) -> BatchEnv:
            env = make_env(**kwargs)
            return check.watch(env) if leave else env

        started = time.perf_counter()
        change = (
            partial(swap, servers, add, check.left)
            if leave
            else partial(kill_repeatedly, servers)
        )
        with run_in_thread(change) as counts:
            result = train(config, run_folder, make_checked_env)
        seconds = time.perf_counter() - started
        evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    console.print(
        f"seed {config.seed}: {dict(counts)} in {seconds:.0f} s; "
        f"{result.steps:,} valid steps, {result.lost_steps:,} lost; "
        f"return {evaluation.mean_return:.1f} over {len(evaluation.returns)} episodes"
    )
    if leave:
        console.print(
            f"{check.num_steps:,} results checked: {check.moved} rows moved, "
            f"{check.missing} rows of running servers were not valid"
        )
        if check.missing or not check.moved:
            return -math.inf
    return evaluation.mean_return


def main(
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed; can be repeated. Default: 0, 1, 2.")
    ] = None,
    servers: Annotated[int, typer.Option(min=2)] = 2,
    leave: Annotated[
        bool, typer.Option("--leave", help="Kill one server, drain one, and add one.")
    ] = False,
) -> None:
    start_tensorflow(1, 1)
    console = Console()
    config = CONFIGS["cartpole"].replace(total_steps=STEPS)
    means = [
        train_once(config.replace(seed=n), servers, console, leave=leave)
        for n in seed or (0, 1, 2)
    ]
    raise typer.Exit(1 if min(means) < GOAL else 0)


if __name__ == "__main__":
    typer.run(main)
