"""Train the examples on CartPole on two servers, some while workers are killed.

    python scripts/run_examples.py [sb3_ppo ...] [--kill-every 2] [--seed 0]

Prints the env steps/s with the envs of each library, with local envs of envserve, and
with servers. Exits with 1 if a mean return is below its goal. Requires the packages
that `make examples` installs.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.processes import temporary_keys
from tests.integration.example_runs import (
    GOALS,
    TRAINED_WHILE_KILLING,
    killing_workers,
    run_example,
    two_servers,
)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Examples to run. Default: all.")
    ] = None,
    kill_every: Annotated[float, typer.Option(help="Seconds between kills.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    console = Console()
    table = Table("example", "library", "local", "servers", "killed", "return", "goal")
    has_failed = False
    for name in names or GOALS:
        console.print(f"{name} ...")
        budget = ["--steps", "20000", "--seed", str(seed)]
        library, local = (run_example(name, *budget, original=x) for x in (True, False))
        with contextlib.ExitStack() as stack:
            servers = stack.enter_context(two_servers())
            options = ["--connect", *(server.address for server in servers)]
            targets = servers if name in TRAINED_WHILE_KILLING else []
            kills = stack.enter_context(killing_workers(targets, kill_every))
            options += ["--seed", str(seed)]
            run = run_example(name, *options, on_trained=kills.is_over.set)
        has_failed |= run.mean_return < GOALS[name]
        speeds = [f"{x.steps_per_second:.0f}" for x in (library, local, run)]
        scores = [str(len(kills.pids)), f"{run.mean_return:.1f}", f"{GOALS[name]:.0f}"]
        table.add_row(name, *speeds, *scores)
    console.print(
        "Env steps/s on the library's envs, on local envs of envserve, and on servers:"
    )
    console.print(table)
    raise typer.Exit(1 if has_failed else 0)


if __name__ == "__main__":
    with temporary_keys():
        typer.run(main)
