"""The command: train the missing runs in parallel, and write the scores of all runs."""

import concurrent.futures
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.scores.document import (
    COLUMNS,
    NUM_TEXTS,
    aggregate,
    draw_curves,
    table_rows,
    write_document,
)
from benchmarks.scores.run_one import Score, read_score, run_one
from benchmarks.scores.tasks import TASKS, Task
from benchmarks.support.tables import as_table
from envserve.host_resources import num_cores
from ppo.errors import suggestion


def main(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="Tasks such as cheetah-1M. Default: all.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds per task. Default: the seeds of the task."),
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder of the runs; finished runs are not repeated.")
    ] = Path("runs/scores"),
    document: Annotated[
        Path | None,
        typer.Option(
            help="Document for the tables, with a plot and a JSON file next to it."
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Number of concurrent runs. 0: one per core.")
    ] = 0,
    train: Annotated[bool, typer.Option(help="Train the missing runs.")] = True,
) -> None:
    """Train configs on several seeds, and compare them with published scores."""
    console = Console()
    chosen = list(_chosen(tasks))
    jobs = [
        (task, seed, runs / task.name / str(seed))
        for task in chosen
        for seed in range(task.num_seeds if seeds is None else seeds)
    ]
    missing = [job for job in jobs if train and read_score(job[2]) is None]
    for number, score in enumerate(_run(missing, processes or num_cores()), 1):
        console.print(
            f"{number}/{len(missing)} {score.task} seed {score.seed}: "
            f"E {score.final:.1f}, B {score.best:.1f} in {score.seconds:.0f} s",
            highlight=False,
        )
    scores = _read(jobs, document and document.with_suffix(".json"))
    console.print(as_table(COLUMNS, table_rows(scores), num_texts=NUM_TEXTS))
    console.print(aggregate(scores), highlight=False)
    if document is not None:
        write_document(document, scores)
        draw_curves(scores, document.with_suffix(".png"))
        _write_numbers(scores, document.with_suffix(".json"))


def _chosen(names: list[str] | None) -> Iterator[Task]:
    by_name = {task.name: task for task in TASKS}
    for name in names or by_name:
        if name not in by_name:
            raise typer.BadParameter(
                f"expected one of {', '.join(by_name)}, got {name!r}."
                f"{suggestion(name, by_name)}"
            )
        yield by_name[name]


def _run(jobs: list[tuple[Task, int, Path]], num_processes: int) -> Iterator[Score]:
    """Run each job in a separate process; yield its score when it has finished."""
    with concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as executor:
        futures = [executor.submit(run_one, *job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def _read(
    jobs: Iterable[tuple[Task, int, Path]], path: Path | None
) -> dict[str, list[Score]]:
    """Return a dict from task names to scores, from the runs and the file `path`.

    If both contain a score for a task and seed, the score of the run counts. If a task
    has scores with the current settings, its other scores are omitted.
    """
    numbers = json.loads(path.read_text("utf-8")) if path and path.exists() else []
    found = {(row["task"], row["seed"]): Score(**row) for row in numbers}
    for task, seed, folder in jobs:
        if (score := read_score(folder)) is not None:
            found[task.name, seed] = score
    scores = {}
    for task in TASKS:
        runs = [found[key] for key in sorted(found) if key[0] == task.name]
        current = [score for score in runs if task.is_made_by(score.settings)]
        scores[task.name] = current or runs
    return scores


def _write_numbers(scores: Mapping[str, list[Score]], path: Path) -> None:
    rows = [score._asdict() for runs in scores.values() for score in runs]
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
