"""`step`: env steps per second, compared with bare loops and other projects."""

from __future__ import annotations

from benchmarks.cases.ours import LIMIT, our_cases
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
from benchmarks.harness import Case
from benchmarks.result import median, ratio, spread
from envserve.bench.cases import bare_loops
from envserve.bench.interleaved import SPEED
from envserve.bench.workload import Workload


@sub_command
def step(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    seconds: Seconds = 0.6,
    repetitions: Repetitions = 5,
) -> None:
    """Measure raw stepping: bare loops, envserve, and other projects."""
    load = Workload(env, num_envs, workers, seconds)
    load.check()
    limit = Case(LIMIT, bare_loops, {"load": load})
    cases = [limit, *our_cases(load), *peer_cases(load)]
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
        notes=[
            "Medians over the repetitions; ratios are medians of the ratios within "
            "each repetition. p50 and p99 are durations of a batch step or, "
            "for the limit, of one pass of a process over its envs."
        ],
    )
