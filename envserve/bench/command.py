"""Measure all cases; print the results and how long each part of a batch step takes."""

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
from envserve.text import counted

_LIMIT, _IN_PROCESS = "limit: bare loops", "envserve in-process"
_SYNC, _ASYNC = "gymnasium SyncVectorEnv", "gymnasium AsyncVectorEnv"

REMEDIES: Final = {
    "client": "put more envs into the batch: most of this cost is per batch step",
    "workers and wake-ups": "put more envs into each worker: wake-ups cost time",
    "server and transport": "put more envs into the batch, or run the envs in-process",
}
"""Advice on how to reduce each overhead of a batch step, by its name in the output."""


def bench(load: Workload, num_rounds: int) -> None:
    """Measure all cases and print the results.

    Raises:
      UnknownEnv: The env is not registered.
      EnvStartError: The env cannot be built.
    """
    progress = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        cases = {}
        for name, case in _cases(load).items():
            progress.print(f"... starting {name}")
            cases[name] = stack.enter_context(case)
        measured = interleave(cases, num_rounds, progress.print)
    # The table needs 110 columns; a narrower console would abbreviate the cells.
    Console(width=max(110, Console().width), highlight=False).print(
        f"{load.env_name}, {counted(load.num_envs, 'env')}, "
        f"{counted(load.num_workers, 'worker')}: env steps per second, medians over "
        f"{counted(num_rounds, 'round')}",
        _table(measured),
        *_time_breakdown(measured, load.num_envs),
        sep="\n",
    )


def _cases(load: Workload) -> dict[str, AbstractContextManager[Measure]]:
    # Start Gymnasium's vector envs before those of envserve, because AsyncVectorEnv
    # forks processes, which is unsafe once ZeroMQ has started threads.
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


def _time_breakdown(measured: Measurements, num_envs: int) -> list[str]:
    """Return sentences that state how long each part of a batch step takes."""
    total = measured.median(_IN_PROCESS, MICROSECONDS)
    parts = {
        # The bare loops spend all their time in the envs.
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
        bottleneck(parts, REMEDIES),
    ]


def bottleneck(parts: Mapping[str, float], remedies: Mapping[str, str]) -> str:
    """Return a sentence that names the bottleneck and advises how to reduce it.

    Args:
      parts: Maps each part of a batch step to its duration. "envs" is the time spent
        in the envs; all other parts are overhead.
      remedies: Maps each part except "envs" to advice on how to reduce it.
    """
    total = sum(parts.values())
    share = parts["envs"] / total
    if share >= 0.5:
        return (
            f"env-bound: {share:.0%} of a batch step is spent in the envs; speed up "
            "the envs or use more cores"
        )
    overhead = {name: value for name, value in parts.items() if name != "envs"}
    largest = max(overhead, key=lambda name: overhead[name])
    return (
        f"overhead-bound: only {share:.0%} of a batch step is spent in the envs; the "
        f"largest overhead is {largest} ({parts[largest] / total:.0%}); "
        f"{remedies[largest]}"
    )
