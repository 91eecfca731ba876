"""`bench step`: env steps per second beside the machine's limit and the peers."""

from __future__ import annotations

from typing import Annotated

import typer

from envserve.bench.bare_loops import bare_loops
from envserve.bench.case_process import Case
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import SPEED, Load, check_env
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    Seconds,
    Workers,
    announcer,
    as_range,
    as_ratio,
    options_of,
)
from envserve.bench.ours import our_cases
from envserve.bench.peers import PEERS, peer_cases
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish

__all__ = ["LIMIT", "step"]

LIMIT = "limit: bare loops"


def step(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    seconds: Seconds = 0.6,
    repetitions: Repetitions = 5,
    only: Only = None,
    import_module: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module that registers the env; repeatable."),
    ] = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure raw stepping: the limit, ours in-process and over sockets, and peers."""
    load = Load(
        env, num_envs, workers, seconds, import_modules=tuple(import_module or ())
    )
    cases = [Case(LIMIT, bare_loops, {"load": load}), *our_cases(load)]
    cases = chosen([*cases, *peer_cases(load)], only or [])
    check_env(env, load.import_modules)
    outcome = take_turns(cases, repetitions, announcer())
    report = Report(
        name="step",
        title=f"{env}, {num_envs} envs, {workers} workers: env steps per second",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "steps/s", "lowest - highest", "p50 us", "p99 us", "/ limit"]
        + [f"/ {short}" for name, short in PEERS.items() if name in outcome.measured],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            "Medians over the repetitions; a ratio is the median of those within each "
            "repetition. p50 and p99 are of one batch step; for the limit, of one "
            "process's round over its envs."
        ],
        plot=Plot(
            "env steps per second",
            outcome.all_values(SPEED),
        ),
        results={
            "ratio_to_limit": {
                case: outcome.ratio(case, LIMIT, SPEED) for case in outcome.measured
            }
        },
    )
    publish(report, Output(outdir, json_file, markdown))


def _row(outcome: Outcome, case: str) -> list[str]:
    return [
        case,
        f"{outcome.median(case, SPEED):,.0f}",
        as_range(outcome.values(case, SPEED)),
        f"{outcome.median(case, 'p50_us'):,.0f}",
        f"{outcome.median(case, 'p99_us'):,.0f}",
        as_ratio(outcome.ratio(case, LIMIT, SPEED)),
        *(
            as_ratio(outcome.ratio(case, peer, SPEED))
            for peer in PEERS
            if peer in outcome.measured
        ),
    ]
