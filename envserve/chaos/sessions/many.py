"""Many simulations, in several processes, and what has come of them."""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from envserve.chaos.sessions.ledger import Violation
from envserve.chaos.sessions.world import World, simulate
from envserve.cores import num_cores
from envserve.lab.tables import as_table

__all__ = ["Outcome", "main", "run_many", "run_one"]


class Outcome(NamedTuple):
    """What has come of one simulation.

    Attributes:
      seed: Its seed.
      num_events: How many events there were.
      num_valid: How many rows came back valid.
      num_lost: How many episodes were lost.
      num_leases: How many leases were asked for.
      num_boots: How many servers were started.
      failure: What has happened that must not; "" if nothing has.
    """

    seed: int
    num_events: int
    num_valid: int = 0
    num_lost: int = 0
    num_leases: int = 0
    num_boots: int = 0
    failure: str = ""


def run_one(seed: int, num_events: int) -> Outcome:
    """Runs one simulation."""
    try:
        world: World = simulate(seed, num_events)
    except Violation as violation:
        return Outcome(seed, num_events, failure=str(violation))
    return Outcome(
        seed,
        world.clock.num_events,
        sum(caller.num_valid for caller in world.callers),
        world.ledger.num_lost,
        sum(caller.num_sessions for caller in world.callers),
        sum(host.num_starts for host in world.hosts),
    )


def run_many(
    first_seed: int, num_seeds: int, events_per_seed: int, num_processes: int
) -> Iterator[Outcome]:
    """Runs simulations with consecutive seeds; yields outcomes as they come."""
    waiting: collections.deque[concurrent.futures.Future[Outcome]] = collections.deque()
    with concurrent.futures.ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),
        initializer=logging.disable,
    ) as processes:
        for seed in range(first_seed, first_seed + num_seeds):
            waiting.append(processes.submit(run_one, seed, events_per_seed))
            if len(waiting) > 4 * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def main(
    events: Annotated[int, typer.Option(help="How many in all, at least.")] = 1_000_000,
    events_per_seed: Annotated[int, typer.Option(help="How many each.")] = 20_000,
    first_seed: Annotated[int, typer.Option(help="The others follow it.")] = 0,
    processes: Annotated[int, typer.Option(help="0: one per core.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run only this one, here.")] = None,
) -> None:
    """Simulates sessions; exits with 1 if anything happened that must not."""
    console = Console()
    if seed is not None:
        logging.disable()
        outcomes = [run_one(seed, events_per_seed)]
        seconds = 0.0
    else:
        num_seeds = -(-events // events_per_seed)
        started = time.monotonic()
        outcomes = []
        with Progress(console=console) as progress:
            task = progress.add_task("simulations", total=num_seeds)
            for outcome in run_many(
                first_seed, num_seeds, events_per_seed, processes or num_cores()
            ):
                outcomes.append(outcome)
                progress.advance(task)
                if outcome.failure:
                    progress.console.print(outcome.failure.partition("\n")[0])
        seconds = time.monotonic() - started
    failures = [outcome for outcome in outcomes if outcome.failure]
    console.print(_table(outcomes, len(failures), seconds))
    for outcome in failures[:3]:
        console.print(outcome.failure, markup=False, highlight=False)
    if failures:
        seeds = " ".join(str(outcome.seed) for outcome in failures)
        console.print(f"failed: {seeds}; look closer with --seed SEED")
        raise typer.Exit(1)


def _table(outcomes: list[Outcome], num_failures: int, seconds: float) -> object:
    def total(count: Callable[[Outcome], int]) -> str:
        return f"{sum(map(count, outcomes)):,}"

    rows = [
        ("simulations", f"{len(outcomes):,}"),
        ("events", total(lambda outcome: outcome.num_events)),
        ("valid rows", total(lambda outcome: outcome.num_valid)),
        ("lost episodes", total(lambda outcome: outcome.num_lost)),
        ("sessions", total(lambda outcome: outcome.num_leases)),
        ("starts of servers", total(lambda outcome: outcome.num_boots)),
        ("seconds", f"{seconds:,.0f}"),
        ("failed simulations", f"{num_failures:,}"),
    ]
    return as_table(["", "number"], rows)
