"""`profile`: measure each part of a batch step, and suggest how to make it faster."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import typer

from benchmarks.cases import envs
from benchmarks.cases.ours import stepping_in_place
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
from benchmarks.harness import Case
from benchmarks.learning.rollouts import RolloutLoad, choosing, simulating
from benchmarks.result import median, spread
from envserve.bench.cases import BINDS, batch_env
from envserve.bench.command import REMEDIES, bottleneck
from envserve.bench.interleaved import (
    MICROSECONDS,
    THREAD,
    Measure,
    Measurements,
    make_measure,
)
from envserve.bench.workload import Workload
from envserve.host_resources import num_cores

Transport = Literal["in-process", "ipc", "tcp"]

_WHOLE, _POLICY, _ENV = "rollout", "policy alone", "envs"
_LANE, _LOCAL_LANE = "lane alone", "lane alone, in-process"
_NOTE = (
    "envs: time of the envs in the slowest worker. client: CPU time of the thread that "
    "calls BatchEnv.step with envs in-process. workers and wake-ups: remaining time of "
    "BatchEnv.step with envs in-process. server and transport: additional time of "
    "BatchEnv.step with envs on a server. rollout: time of a rollout that is spent "
    "neither in the policy nor in BatchEnv.step."
)
_REMEDIES = {
    **REMEDIES,
    "policy": "make the networks smaller, or use two splits, so that envs step at the "
    "same time",
    "rollout": "put more envs into the batch, because this cost is per batch step",
}


@sub_command
def profile(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    transport: Annotated[
        Transport, typer.Option(help="Where the envs run: in-process, or on a server.")
    ] = "in-process",
    horizon: Annotated[int, typer.Option(min=1, help="Batch steps per rollout.")] = 128,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 5,
) -> None:
    """Measure the parts of a batch step, to find its bottleneck."""
    load = Workload(env, num_envs, workers, seconds)
    binds = BINDS.get(transport, ())
    transported = {"load": load, "binds": binds}
    cases = [
        Case(_WHOLE, simulating, {"work": RolloutLoad(load, horizon, binds)}),
        Case(_POLICY, choosing, {"work": RolloutLoad(load, horizon)}),
        Case(_LANE, stepping_in_place, transported),
        Case(_ENV, timing_envs, transported),
    ]
    if binds:
        cases.append(Case(_LOCAL_LANE, stepping_in_place, {"load": load}))
    load.check()
    measured = run.measure_all(cases, repetitions)
    runs = [_parts(measured, index) for index in range(repetitions)]
    parts = Measurements({n: [{MICROSECONDS: r[n]} for r in runs] for n in runs[0]})
    medians = {name: parts.median(name, MICROSECONDS) for name in parts.by_case}
    total = measured.median(_WHOLE, MICROSECONDS)
    run.publish(
        title=f"{env}, {num_envs} envs, {workers} workers, {transport}: where the "
        f"{total:,.0f} us of a batch step go",
        measured=measured,
        shown=parts,
        heading="part",
        columns={
            "us per batch step": median(MICROSECONDS),
            "lowest - highest": spread(MICROSECONDS),
            "share": lambda _, part: f"{medians[part] / total:.0%}",
        },
        notes=[_NOTE, bottleneck(medians, _REMEDIES)],
    )


@contextlib.contextmanager
def timing_envs(load: Workload, binds: tuple[str, ...]) -> Iterator[Measure]:
    """Measure the time of the envs in the slowest worker; each env times itself."""
    timed = replace(
        load,
        env_name="envserve/Timed-v0",
        env_kwargs={"env_name": load.env_name},
        import_modules=(envs.MODULE,),
    )
    options = ("--expose", "seconds") if binds else ()
    with batch_env(timed, binds, options) as batch:
        steps = itertools.count(1)
        last = 0

        def step(actions: Any) -> None:
            nonlocal last
            batch.step(actions)
            last = next(steps)

        step_batch = make_measure(step, load.actions(), load)

        def measure() -> Mapping[str, float]:
            before, first = np.array(batch.get_attr("seconds")), last
            step_batch()
            spent = np.array(batch.get_attr("seconds")) - before
            longest = longest_worker(spent, load.num_workers, num_cores())
            return {MICROSECONDS: 1e6 * longest / (last - first)}

        yield measure


def longest_worker(spent: np.ndarray, workers: int, cores: int) -> float:
    """Return the minimum time in which the workers can do the work of all envs.

    It is the larger of two times: that of the slowest worker, and that of all workers
    divided by `cores`. Workers that outnumber the cores cannot all run simultaneously.

    Args:
      spent: Time of each env, in row order.
      workers: Number of processes; each steps an equal share of the rows.
      cores: Number of processes that can run at the same time.
    """
    per_worker = [part.sum() for part in np.array_split(spent, workers)]
    return float(max(*per_worker, spent.sum() / cores))


def _parts(measured: Measurements, repetition: int) -> dict[str, float]:
    """Return a dict from each part of a batch step to its time in us.

    The sum of these times is the time of a batch step in a rollout.
    """
    value = {c: measured.values(c, MICROSECONDS)[repetition] for c in measured.by_case}
    local_lane = _LOCAL_LANE if _LOCAL_LANE in value else _LANE
    local, client = value[local_lane], measured.values(local_lane, THREAD)[repetition]
    parts = {
        "policy": value[_POLICY],
        "rollout": value[_WHOLE] - value[_LANE] - value[_POLICY],
        "client": client,
        "workers and wake-ups": local - client - value[_ENV],
        "envs": value[_ENV],
    }
    if _LOCAL_LANE in value:
        parts["server and transport"] = value[_LANE] - local
    return parts
