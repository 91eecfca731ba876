"""Run many simulations in several processes, and summarise them."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.support.tables import as_table
from envserve.host_resources import num_cores
from tests.simulation.journal import Violation
from tests.simulation.simulation import simulate


class SimulationResult(NamedTuple):
    """The result of one simulation.

    Attributes:
      failure: Description of a violation; empty if there was none.
    """

    seed: int
    counts: Counter[str]
    failure: str = ""


def run_one(seed: int, num_events: int) -> SimulationResult:
    try:
        simulation = simulate(seed, num_events)
    except Violation as violation:
        return SimulationResult(seed, Counter(events=num_events), str(violation))
    counts = Counter(
        events=simulation.clock.num_events,
        episodes_lost=simulation.journal.num_lost,
        sessions_and_batches=len(simulation.ledgers),
        starts_of_servers=sum(host.num_starts for host in simulation.hosts),
    )
    for ledger in simulation.ledgers:
        counts["valid_rows"] += ledger.num_valid
        counts["lost_rows"] += ledger.losses.total()
        counts["padding"] += ledger.num_padding
        counts["late_rows"] += ledger.num_late
    return SimulationResult(seed, counts)


def run_many(
    first_seed: int, num_seeds: int, events_per_seed: int, num_processes: int
) -> Iterator[SimulationResult]:
    """Run simulations with consecutive seeds; yield results in order of seeds."""
    with concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=logging.disable
    ) as processes:
        seeds = range(first_seed, first_seed + num_seeds)
        yield from processes.map(run_one, seeds, itertools.repeat(events_per_seed))


def main(
    events: Annotated[
        int, typer.Option(help="Minimum total number of events.")
    ] = 1_000_000,
    events_per_seed: Annotated[
        int, typer.Option(help="Number of events per seed.")
    ] = 20_000,
    first_seed: Annotated[
        int, typer.Option(help="First of the consecutive seeds.")
    ] = 0,
    processes: Annotated[
        int, typer.Option(help="Number of processes; 0 for one per core.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Run only this seed, in this process.")
    ] = None,
) -> None:
    """Simulate sessions; exit with code 1 if an invariant was violated."""
    console = Console()
    if seed is not None:
        logging.disable()
        results = [run_one(seed, events_per_seed)]
        seconds = 0.0
    else:
        num_seeds = -(-events // events_per_seed)
        started = time.monotonic()
        results = []
        with Progress(console=console) as progress:
            task = progress.add_task("simulations", total=num_seeds)
            for result in run_many(
                first_seed, num_seeds, events_per_seed, processes or num_cores()
            ):
                results.append(result)
                progress.advance(task)
                if result.failure:
                    progress.console.print(result.failure.partition("\n")[0])
        seconds = time.monotonic() - started
    failures = [result for result in results if result.failure]
    console.print(_table(results, len(failures), seconds))
    for result in failures[:3]:
        console.print(result.failure, markup=False, highlight=False)
    if failures:
        seeds = " ".join(str(result.seed) for result in failures)
        console.print(f"failed seeds: {seeds}; repeat one with --seed SEED")
        raise typer.Exit(1)


def _table(
    results: list[SimulationResult], num_failures: int, seconds: float
) -> object:
    totals = Counter(simulations=len(results))
    for result in results:
        totals += result.counts
    rows = [(name.replace("_", " "), f"{count:,}") for name, count in totals.items()]
    rows.append(("seconds", f"{seconds:,.0f}"))
    rows.append(("failed simulations", f"{num_failures:,}"))
    return as_table(["", "number"], rows)
