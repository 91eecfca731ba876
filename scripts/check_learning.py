"""Check that the named configs learn what they should, on several seeds.

    python scripts/check_learning.py                  all configs, seeds 0, 1 and 2
    python scripts/check_learning.py cartpole --seed 0

Prints a table, and exits with 1 if any run misses its goal.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ppo.commands.shared import start_tensorflow
from ppo.configs import CONFIGS
from ppo.run_folder.folder import RunFolder

# Mean return of 100 evaluation episodes with the most likely actions.
GOALS = {"cartpole": 475.0, "pendulum": -200.0, "cheetah": 3000.0}


def run_once(name: str, seed: int) -> tuple[int, float, float]:
    """Return the steps, the seconds of training, and the mean evaluation return."""
    from ppo.environments import env_maker
    from ppo.evaluate import evaluate_run
    from ppo.train import train

    config = CONFIGS[name].replace(seed=seed)
    make_env = env_maker(config)
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder.create(Path(folder), config)
        started = time.perf_counter()
        result = train(config, run_folder, make_env)
        seconds = time.perf_counter() - started
        evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    return result.steps, seconds, evaluation.mean_return


def main(
    configs: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Default: 0, 1, 2.")] = None,
) -> None:
    start_tensorflow(1, 1)
    console = Console()
    table = Table("config", "seed", "steps", "steps/s", "return", "goal", "")
    has_missed = False
    for name in configs or GOALS:
        for number in seed or (0, 1, 2):
            steps, seconds, mean = run_once(name, number)
            is_reached = mean >= GOALS[name]
            has_missed |= not is_reached
            row = [name, str(number), f"{steps:,}", f"{steps / seconds:,.0f}"]
            row += [f"{mean:.1f}", f"{GOALS[name]:.0f}"]
            row.append("reached" if is_reached else "MISSED")
            console.print(*row)
            table.add_row(*row)
    console.print(table)
    raise typer.Exit(1 if has_missed else 0)


if __name__ == "__main__":
    typer.run(main)
