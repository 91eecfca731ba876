"""`images`: throughput of image observations, from envs that do no other work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.cases import envs
from benchmarks.cases.ours import (
    IN_PROCESS,
    IPC,
    TCP,
    WITHOUT_KEYS,
    our_cases,
    stepping_in_place,
)
from benchmarks.cases.peers import ASYNC, SB3, TIANSHOU, peer_cases
from benchmarks.command import (
    CORES,
    NumEnvs,
    Repetitions,
    Run,
    Seconds,
    Workers,
    sub_command,
)
from benchmarks.harness import Case
from benchmarks.result import median, ratio, spread
from envserve.bench.interleaved import SPEED
from envserve.bench.workload import Workload

REUSING: Final = "envserve in-process, out="
_CASES: Final = (
    *(REUSING, IN_PROCESS, IPC, TCP, WITHOUT_KEYS),
    *(ASYNC, SB3, TIANSHOU),
)
_IMAGE_BYTES: Final = 84 * 84 * 4


@sub_command
def images(
    run: Run,
    num_envs: NumEnvs = 32,
    workers: Workers = CORES,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 3,
) -> None:
    """Measure GB/s of images, uint8 84x84x4, from envs that do no other work."""
    modules = (envs.MODULE,)
    name = "envserve/Image-v0"
    load = Workload(name, num_envs, workers, seconds, import_modules=modules)
    reusing = Case(REUSING, stepping_in_place, {"load": load})
    cases = [reusing, *our_cases(load), *peer_cases(load)]
    cases = [case for case in cases if case.name in _CASES]
    measured = run.measure(cases, repetitions)
    run.publish(
        title=f"{num_envs} envs with images of {_IMAGE_BYTES:,} bytes, {workers} "
        "workers: GB/s of observations",
        measured=measured,
        columns={
            "GB/s": median(_gigabytes, ".2f"),
            "lowest - highest": spread(_gigabytes, ".2f"),
            "steps/s": median(SPEED),
            "p50 us": median("p50_us"),
            "p99 us": median("p99_us"),
            "/ Async": ratio(ASYNC, SPEED),
        },
        notes=[
            "A GB is 1e9 bytes of images, which are copied to the caller: into new "
            "arrays in each step or, with out=, into the same arrays, as in a rollout."
        ],
        results={"image_bytes": _IMAGE_BYTES},
    )


def _gigabytes(numbers: Mapping[str, float]) -> float:
    return numbers[SPEED] * _IMAGE_BYTES / 1e9
