"""`bench profile`: where the time of a batch step goes, and what to do about it."""

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import typer

from envserve.bench import envs
from envserve.bench.case_process import BenchmarkError, Case, Measure
from envserve.bench.harness import Outcome, take_turns
from envserve.bench.load import Load, check_env
from envserve.bench.options import (
    CORES,
    JsonFile,
    Markdown,
    NumEnvs,
    OutDir,
    Repetitions,
    Seconds,
    Workers,
    announcer,
    as_range,
    options_of,
)
from envserve.bench.ours import our_batch
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from envserve.cores import num_cores
from ppo.bench.rollouts import (
    MICROSECONDS,
    RolloutLoad,
    choosing,
    repeating,
    simulating,
    stepping_lane,
)

__all__ = ["judge", "longest_worker", "profile"]

Transport = Literal["in-process", "ipc", "tcp"]

_BINDS: dict[str, tuple[str, ...]] = {
    "in-process": (),
    "ipc": ("ipc://{folder}/envs",),
    "tcp": ("tcp://127.0.0.1:0",),
}
_WHOLE = "rollout"
_POLICY = "policy alone"
_LANE = "lane alone"
_LOCAL_LANE = "lane alone, in-process"
_ENV = "envs"

_NOTE = (
    "envs: in the worker that takes longest. client: what the stepping thread computes "
    "in BatchEnv.step with envs in-process. workers and wake-ups: the rest of that "
    "step. server and transport: what one over a server takes longer. graph: what a "
    "rollout takes beyond policy and BatchEnv.step."
)
_REMEDIES = {
    "policy": "make the networks smaller, or use two splits, so that envs step "
    "meanwhile",
    "graph": "put more envs into the batch: this is paid per batch step",
    "client": "put more envs into the batch: most of this is paid per batch step",
    "workers and wake-ups": "put more envs into each worker: a wake-up is paid per "
    "worker, however many envs it has",
    "server and transport": "put more envs into the batch, or run the envs in-process",
}


def profile(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    transport: Annotated[
        Transport, typer.Option(help="How the envs are reached.")
    ] = "in-process",
    horizon: Annotated[int, typer.Option(min=1, help="Steps of a rollout.")] = 128,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 5,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Tell what a batch step's time is made of: am I env-bound or overhead-bound?"""
    load = Load(env, num_envs, workers, seconds)
    work = RolloutLoad(load, horizon, _BINDS[transport])
    local = replace(work, binds=())
    cases = [
        Case(_WHOLE, simulating, {"work": work}),
        Case(_POLICY, choosing, {"work": local}),
        Case(_LANE, stepping_lane, {"work": work}),
        Case(_ENV, timing_envs, {"work": work}),
    ]
    if work.binds:
        cases.append(Case(_LOCAL_LANE, stepping_lane, {"work": local}))
    check_env(env)
    outcome = take_turns(cases, repetitions, announcer())
    if outcome.skipped:
        reasons = "; ".join(outcome.skipped.values())
        raise BenchmarkError(f"profile needs all of its cases: {reasons}")
    shares = [_shares(outcome, at) for at in range(repetitions)]
    parts = {name: [repetition[name] for repetition in shares] for name in shares[0]}
    total = statistics.median(outcome.values(_WHOLE, MICROSECONDS))
    verdict = judge({name: statistics.median(v) for name, v in parts.items()}, total)
    report = Report(
        name="profile",
        title=f"{env}, {num_envs} envs, {workers} workers, {transport}: where the "
        f"{total:,.0f} us of a batch step go",
        options=options_of(context),
        outcome=outcome,
        columns=["part", "us per batch step", "lowest - highest", "share"],
        rows=[_row(name, values, total) for name, values in parts.items()],
        notes=[_NOTE, verdict],
        plot=Plot("us per batch step", parts),
        results={"verdict": verdict},
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def timing_envs(work: RolloutLoad) -> Iterator[Measure]:
    """Step envs that look at the clock; measures those of the slowest worker."""
    load = replace(
        work.load,
        env_name="envserve/Timed-v0",
        env_kwargs={"env_name": work.load.env_name},
        import_modules=(envs.MODULE,),
    )
    options = ("--expose", "seconds") if work.binds else ()
    with our_batch(load, work.binds, options) as batch:
        actions = itertools.cycle(work.load.actions())
        batch_steps = 0

        def run() -> None:
            nonlocal batch_steps
            for _ in range(work.horizon):
                batch.step(next(actions))
            batch_steps += work.horizon

        repeat = repeating(run, work.horizon, load.seconds)

        def measure() -> Mapping[str, float]:
            before, first = np.array(batch.get_attr("seconds")), batch_steps
            repeat()
            spent = np.array(batch.get_attr("seconds")) - before
            longest = longest_worker(spent, load.workers, num_cores())
            return {MICROSECONDS: 1e6 * longest / (batch_steps - first)}

        yield measure


def longest_worker(spent: np.ndarray, workers: int, cores: int) -> float:
    """Return what the slowest worker takes; more where workers outnumber cores.

    Args:
        spent: time of each env, by row.
        workers: processes that the rows are spread over.
        cores: how many of them can run at a time.
    """
    per_worker = [part.sum() for part in np.array_split(spent, workers)]
    return float(max(*per_worker, spent.sum() / cores))


def _shares(outcome: Outcome, at: int) -> dict[str, float]:
    """Return the parts of one repetition; they sum up to the whole."""
    value = {case: outcome.values(case, MICROSECONDS)[at] for case in outcome.measured}
    local_lane = _LOCAL_LANE if _LOCAL_LANE in value else _LANE
    local, client = value[local_lane], outcome.values(local_lane, "thread_us")[at]
    parts = {
        "policy": value[_POLICY],
        "graph": value[_WHOLE] - value[_LANE] - value[_POLICY],
        "client": client,
        "workers and wake-ups": local - client - value[_ENV],
        "envs": value[_ENV],
    }
    if _LOCAL_LANE in value:
        parts["server and transport"] = value[_LANE] - local
    return parts


def _row(name: str, values: list[float], total: float) -> list[str]:
    median = statistics.median(values)
    return [name, f"{median:,.0f}", as_range(values), f"{median / total:.0%}"]


def judge(parts: Mapping[str, float], total: float) -> str:
    """Say in one sentence what bounds the speed, and what helps against it."""
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
        f"most goes to {largest} ({parts[largest] / total:.0%}); {_REMEDIES[largest]}"
    )
