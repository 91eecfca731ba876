"""`step`: env steps per second beside the machine's limit and the peers."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cases.ours import LIMIT, limit_case, our_cases
from benchmarks.cases.peers import PEERS, peer_cases
from benchmarks.command import (
    CORES,
    EnvName,
    NumEnvs,
    Repetitions,
    Run,
    Seconds,
    Workers,
    sub_command,
)
from benchmarks.plot import Plot
from benchmarks.result import median, ratio, spread
from envserve.bench.load import Load
from envserve.bench.turns import SPEED

__all__ = ["step"]


@sub_command
def step(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    seconds: Seconds = 0.6,
    repetitions: Repetitions = 5,
    import_module: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module that registers the env; repeatable."),
    ] = None,
) -> None:
    """Measure raw stepping: the limit, ours in-process and over sockets, and peers."""
    modules = tuple(import_module or ())
    load = Load(env, num_envs, workers, seconds, import_modules=modules)
    load.check()
    cases = [limit_case(load), *our_cases(load), *peer_cases(load)]
    measured = run.measure(cases, repetitions)
    peers = {f"/ {PEERS[name]}": name for name in PEERS if name in measured.by_case}
    run.publish(
        title=f"{env}, {num_envs} envs, {workers} workers: env steps per second",
        measured=measured,
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "p50 us": median("p50_us"),
            "p99 us": median("p99_us"),
            "/ limit": ratio(LIMIT, SPEED),
            **{head: ratio(name, SPEED) for head, name in peers.items()},
        },
        plot=Plot("env steps per second", SPEED),
        notes=[
            "Medians over the repetitions; a ratio is the median of those within each "
            "repetition. p50 and p99 are of one batch step; for the limit, of one "
            "process's round over its envs."
        ],
        results={
            "ratio_to_limit": {
                case: measured.ratio(case, LIMIT, SPEED) for case in measured.by_case
            }
        },
    )
