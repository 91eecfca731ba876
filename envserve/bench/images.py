"""`bench images`: bytes of observations per second, where envs cost next to nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

import typer

from envserve.bench import envs
from envserve.bench.case_process import Case, Measure
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import SPEED, Load, stepping
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
from envserve.bench.ours import IN_PROCESS, IPC, TCP, our_batch, our_cases
from envserve.bench.peers import ASYNC, SB3, TIANSHOU, peer_cases
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish

__all__ = ["REUSING", "images"]

REUSING: Final = "envserve in-process, out="
_CASES: Final = (REUSING, IN_PROCESS, IPC, TCP, ASYNC, SB3, TIANSHOU)
_IMAGE_BYTES: Final = 84 * 84 * 4


def images(
    context: typer.Context,
    num_envs: NumEnvs = 32,
    workers: Workers = CORES,
    seconds: Seconds = 1.0,
    repetitions: Repetitions = 3,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure GB/s of images, uint8 84x84x4, from envs that do nothing else."""
    load = Load(
        "envserve/Image-v0", num_envs, workers, seconds, import_modules=(envs.MODULE,)
    )
    reusing = Case(REUSING, stepping_into_the_same_arrays, {"load": load})
    cases = [reusing, *our_cases(load), *peer_cases(load)]
    cases = chosen([case for case in cases if case.name in _CASES], only or [])
    outcome = take_turns(cases, repetitions, announcer())
    report = Report(
        name="images",
        title=f"{num_envs} envs with images of {_IMAGE_BYTES:,} bytes, {workers} "
        "workers: GB/s of observations",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "GB/s", "lowest - highest", "steps/s", "p50 us", "p99 us"]
        + ["/ Async"],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            "A GB is 1e9 bytes of images that the caller has got in arrays of its own; "
            "with out= in the same ones at each step, as rollouts are written."
        ],
        plot=Plot(
            "GB/s of observations",
            {case: _gigabytes(outcome, case) for case in outcome.measured},
        ),
        results={
            "image_bytes": _IMAGE_BYTES,
            "gigabytes_per_second": {
                case: _gigabytes(outcome, case) for case in outcome.measured
            },
        },
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def stepping_into_the_same_arrays(load: Load) -> Iterator[Measure]:
    """Steps all envs, and has the rows written to arrays that there are."""
    with our_batch(load, ()) as batch:
        actions = load.actions()
        out = batch.step(actions[0])
        step = functools.partial(batch.step, out=out)
        yield stepping(step, actions, load)


def _gigabytes(outcome: Outcome, case: str) -> list[float]:
    return [speed * _IMAGE_BYTES / 1e9 for speed in outcome.values(case, SPEED)]


def _row(outcome: Outcome, case: str) -> list[str]:
    speed = outcome.median(case, SPEED)
    return [
        case,
        f"{speed * _IMAGE_BYTES / 1e9:.2f}",
        as_range(_gigabytes(outcome, case), ".2f"),
        f"{speed:,.0f}",
        f"{outcome.median(case, 'p50_us'):,.0f}",
        f"{outcome.median(case, 'p99_us'):,.0f}",
        as_ratio(outcome.ratio(case, ASYNC, SPEED)),
    ]
