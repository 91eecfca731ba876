"""The command: a table of all cases, and where the time of a batch step goes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from rich.console import Console
from rich.table import Table

from envserve.bench.cases import BINDS, bare_loops, stepping_batch_env, vector_env
from envserve.bench.interleaved import (
    MICROSECONDS,
    SPEED,
    THREAD,
    Measure,
    Measurements,
    interleave,
)
from envserve.bench.workload import Workload

_LIMIT, _IN_PROCESS = "limit: bare loops", "envserve in-process"
_SYNC, _ASYNC = "gymnasium SyncVectorEnv", "gymnasium AsyncVectorEnv"

REMEDIES: Final = {
    "client": "put more envs into the batch: most of this is paid per batch step",
    "workers and wake-ups": "put more envs into each worker: each costs a wake-up",
    "server and transport": "put more envs into the batch, or run the envs in-process",
}
"""What helps against each part of a batch step that is not the envs' own time."""


def bench(load: Workload, num_turns: int) -> None:
    """Measures all cases and prints what came out.

    Raises:
      UnknownEnv: There is no such env.
      EnvStartError: It cannot be built.
    """
    progress = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        cases = {}
        for name, case in _cases(load).items():
            progress.print(f"... starting {name}")
            cases[name] = stack.enter_context(case)
        measured = interleave(cases, num_turns, progress.print)
    # Lines in files need not be wrapped as on a narrow screen.
    Console(width=max(110, Console().width), highlight=False).print(
        f"{load.env_name}, {load.num_envs} envs, {load.num_workers} workers: env steps "
        f"per second, medians over {num_turns} turns",
        _table(measured),
        *_account(measured, load.num_envs),
        sep="\n",
    )


def _cases(load: Workload) -> dict[str, AbstractContextManager[Measure]]:
    # Gymnasium's first: it forks, and ZeroMQ has threads.
    return {
        _LIMIT: bare_loops(load),
        _SYNC: vector_env(load, "SyncVectorEnv"),
        _ASYNC: vector_env(load, "AsyncVectorEnv"),
        _IN_PROCESS: stepping_batch_env(load),
        **{f"envserve {how}": stepping_batch_env(load, b) for how, b in BINDS.items()},
    }


def _table(measured: Measurements) -> Table:
    bases = {"/ limit": _LIMIT, "/ Sync": _SYNC, "/ Async": _ASYNC}
    table = Table("case")
    for head in ("steps/s", "lowest - highest", "p50 us", "p99 us", *bases):
        table.add_column(head, justify="right")
    for case in measured.by_case:
        speeds = measured.values(case, SPEED)
        table.add_row(
            case,
            f"{measured.median(case, SPEED):,.0f}",
            f"{min(speeds):,.0f} - {max(speeds):,.0f}",
            f"{measured.median(case, 'p50_us'):,.0f}",
            f"{measured.median(case, 'p99_us'):,.0f}",
            *(f"{measured.ratio(case, base, SPEED):.2f}" for base in bases.values()),
        )
    return table


def _account(measured: Measurements, num_envs: int) -> list[str]:
    """Returns where the time of a batch step goes, as sentences."""
    total = measured.median(_IN_PROCESS, MICROSECONDS)
    parts = {
        # What all processes need for so many steps when they do nothing else.
        "envs": 1e6 * num_envs / measured.median(_LIMIT, SPEED),
        "client": measured.median(_IN_PROCESS, THREAD),
    }
    parts["workers and wake-ups"] = total - sum(parts.values())
    shares = ", ".join(f"{name} {us:,.0f} us" for name, us in parts.items())
    added = " and ".join(
        f"{measured.median(f'envserve {way}', MICROSECONDS) - total:,.0f} us over {way}"
        for way in BINDS
    )
    return [
        f"A batch step in-process takes {total:,.0f} us: {shares}.",
        f"A server on this host adds {added}.",
        judge(parts, REMEDIES),
    ]


def judge(parts: Mapping[str, float], remedies: Mapping[str, str]) -> str:
    """Says in one sentence what bounds the speed, and what helps against it.

    Args:
      parts: Times that a batch step is made of, by name; those in "envs" are the envs'.
      remedies: What helps against each of the others.
    """
    total = sum(parts.values())
    share = parts["envs"] / total
    if share >= 0.5:
        return (
            f"env-bound: {share:.0%} of a batch step is the envs' own time; faster "
            "envs or more cores help, less overhead hardly does"
        )
    overhead = {name: value for name, value in parts.items() if name != "envs"}
    largest = max(overhead, key=lambda name: overhead[name])
    return (
        f"overhead-bound: only {share:.0%} of a batch step is the envs' own time, the "
        f"most goes to {largest} ({parts[largest] / total:.0%}); {remedies[largest]}"
    )
