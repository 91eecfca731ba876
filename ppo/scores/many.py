"""Runs what is missing, several at a time, and writes what it has come to."""

import concurrent.futures
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envserve.cores import num_cores
from envserve.lab.tables import as_table
from ppo.config_text import suggestion
from ppo.scores.report import COLUMNS, draw_curves, table_rows, write_document
from ppo.scores.run_one import Outcome, read_outcome, run_one
from ppo.scores.tasks import TASKS, Task

__all__ = ["main"]

_NUM_TEXTS = 5


def main(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Such as cheetah-1M. Default: all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per task. Default: the task's.")
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder of the runs; what is there is not run again.")
    ] = Path("runs/scores"),
    document: Annotated[
        Path | None, typer.Option(help="Document to write the tables into, with plot.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Runs at a time. 0: one per core.")
    ] = 0,
) -> None:
    """Trains configs on several seeds, and compares them with published scores."""
    console = Console()
    chosen = list(_chosen(tasks))
    jobs = [
        (task, seed, runs / task.name / str(seed))
        for task in chosen
        for seed in range(task.num_seeds if seeds is None else seeds)
    ]
    missing = [job for job in jobs if read_outcome(job[2]) is None]
    for number, outcome in enumerate(_run(missing, processes or num_cores()), 1):
        console.print(
            f"{number}/{len(missing)} {outcome.task} seed {outcome.seed}: "
            f"E {outcome.final:.1f}, B {outcome.best:.1f} in {outcome.seconds:.0f} s",
            highlight=False,
        )
    outcomes = _read(jobs)
    console.print(as_table(COLUMNS, table_rows(outcomes), num_texts=_NUM_TEXTS))
    if document is not None:
        write_document(document, outcomes)
        draw_curves(outcomes, document.with_suffix(".png"))
        _write_numbers(outcomes, document.with_suffix(".json"))


def _chosen(names: list[str] | None) -> Iterator[Task]:
    by_name = {task.name: task for task in TASKS}
    for name in names or by_name:
        if name not in by_name:
            raise typer.BadParameter(
                f"expected one of {', '.join(by_name)}, got {name!r}."
                f"{suggestion(name, by_name)}"
            )
        yield by_name[name]


def _run(jobs: list[tuple[Task, int, Path]], num_processes: int) -> Iterator[Outcome]:
    """Runs each job in a process of its own; yields what they come to, as they do."""
    with concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as executor:
        futures = [executor.submit(run_one, *job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def _read(jobs: Iterable[tuple[Task, int, Path]]) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {}
    for task, _, folder in jobs:
        if (outcome := read_outcome(folder)) is not None:
            outcomes.setdefault(task.name, []).append(outcome)
    return outcomes


def _write_numbers(outcomes: Mapping[str, list[Outcome]], path: Path) -> None:
    rows = [outcome._asdict() for runs in outcomes.values() for outcome in runs]
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
