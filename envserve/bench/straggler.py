"""`bench straggler`: what one slow env costs when rows are taken as they get ready.

Every reply says which request it answers, and is compared with what was sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import numpy as np
import typer

from envserve.bench import envs
from envserve.bench.case_process import BenchmarkError, Case, Measure
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.load import SPEED, Load
from envserve.bench.options import (
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    Seconds,
    announcer,
    as_range,
    as_ratio,
    options_of,
)
from envserve.bench.ours import our_batch
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from envserve.client import BatchEnv

__all__ = ["straggler"]

Array = np.ndarray[Any, Any]

_TCP: Final = ("tcp://127.0.0.1:0",)
_NONE_SLOW, _ONE_SLOW, _STEP = "none slow", "one slow", "one slow, step()"
_WAYS: Final[dict[str, tuple[str, ...]]] = {"in-process": (), "tcp": _TCP}


def straggler(
    context: typer.Context,
    num_envs: NumEnvs = 32,
    milliseconds: Annotated[
        float, typer.Option(min=0.001, help="What a step takes.")
    ] = 2.0,
    factor: Annotated[float, typer.Option(help="How much slower one env is.")] = 100.0,
    min_envs: Annotated[
        int | None, typer.Option(min=1, help="Rows per recv. Default: what is ready.")
    ] = None,
    seconds: Seconds = 2.0,
    repetitions: Repetitions = 3,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure send and recv with one slow env against none, a worker per env."""
    load = Load(
        "envserve/Request-v0",
        num_envs,
        num_envs,
        seconds,
        import_modules=(envs.MODULE,),
    )
    normal = {"load": load, "microseconds": milliseconds * 1e3}
    slow = {**normal, "factor": factor}
    some = {"min_envs": min_envs}
    cases = []
    for way, binds in _WAYS.items():
        cases += [
            Case(f"{way}: {_NONE_SLOW}", sending, {**normal, **some, "binds": binds}),
            Case(f"{way}: {_ONE_SLOW}", sending, {**slow, **some, "binds": binds}),
            Case(f"{way}: {_STEP}", stepping_all, {**slow, "binds": binds}),
        ]
    outcome = take_turns(chosen(cases, only or []), repetitions, announcer())
    report = Report(
        name="straggler",
        title=f"{num_envs} envs, a step sleeps {milliseconds:g} ms, in one of them "
        f"{milliseconds * factor:g} ms: env steps per second",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "steps/s", "lowest - highest", "/ none slow"],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            f"A worker per env; recv waits for {min_envs or 1} of them. "
            "Every reply was compared with its request, none was wrong: "
            f"{_total(outcome, 'replies'):,.0f} replies."
        ],
        plot=Plot(
            "env steps per second",
            outcome.all_values(SPEED),
        ),
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def sending(
    load: Load,
    binds: tuple[str, ...],
    microseconds: float,
    min_envs: int | None,
    factor: float = 1.0,
) -> Iterator[Measure]:
    """Sends each row its next request as soon as a recv has given its last reply."""
    with our_batch(load, binds) as batch:
        ledger = _Ledger(load.num_envs, microseconds, factor)

        def measure() -> Mapping[str, float]:
            everyone = np.arange(load.num_envs)
            batch.send(ledger.requests(everyone))
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < load.seconds:
                rows, result = batch.recv(min_envs)
                steps += len(rows)
                ledger.check(rows, result.observation, result.valid)
                batch.send(ledger.requests(rows), rows)
            elapsed = time.perf_counter() - began
            rows, result = batch.recv(load.num_envs)  # leave nothing under way
            ledger.check(rows, result.observation, result.valid)
            return {SPEED: steps / elapsed, "replies": ledger.take_count()}

        yield measure


@contextlib.contextmanager
def stepping_all(
    load: Load,
    binds: tuple[str, ...],
    microseconds: float,
    factor: float = 1.0,
) -> Iterator[Measure]:
    """Steps all rows together: what the slow env costs without send and recv."""
    with our_batch(load, binds) as batch:
        ledger = _Ledger(load.num_envs, microseconds, factor)
        yield lambda: _step_all(batch, ledger, load.seconds)


def _step_all(batch: BatchEnv, ledger: _Ledger, seconds: float) -> Mapping[str, float]:
    everyone = np.arange(batch.num_envs)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        result = batch.step(ledger.requests(everyone))
        ledger.check(everyone, result.observation, result.valid)
        steps += batch.num_envs
    elapsed = time.perf_counter() - began
    return {SPEED: steps / elapsed, "replies": ledger.take_count()}


class _Ledger:
    """Numbers the requests, and knows what each row must answer."""

    def __init__(self, num_envs: int, microseconds: float, factor: float) -> None:
        self._requests = np.zeros((num_envs, 2), np.int64)
        self._requests[:, 1] = int(microseconds)
        self._requests[0, 1] = int(microseconds * factor)
        self._steps = np.zeros(num_envs, np.int64)
        self._next = 0
        self._count = 0

    def requests(self, rows: Array) -> Array:
        """Returns new requests `[len(rows), 2]` for some rows; no number is reused."""
        self._requests[rows, 0] = np.arange(self._next, self._next + len(rows))
        self._next += len(rows)
        self._steps[rows] += 1
        return self._requests[rows]

    def check(self, rows: Array, observation: Array, valid: Array) -> None:
        """Compares replies `[len(rows), 2]` with the requests of their rows."""
        expected = np.stack([self._requests[rows, 0], self._steps[rows]], axis=1)
        wrong = np.flatnonzero((observation != expected).any(axis=1) | ~valid)
        if wrong.size:
            at = wrong[0]
            raise BenchmarkError(
                f"row {rows[at]}: expected the reply to request and step "
                f"{expected[at].tolist()}; got {observation[at].tolist()}"
            )
        self._count += len(rows)

    def take_count(self) -> int:
        """Returns how many replies have been compared since the last call."""
        count, self._count = self._count, 0
        return count


def _total(outcome: Outcome, number: str) -> float:
    return sum(sum(outcome.values(case, number)) for case in outcome.measured)


def _row(outcome: Outcome, case: str) -> list[str]:
    base = f"{case.partition(':')[0]}: {_NONE_SLOW}"
    return [
        case,
        f"{outcome.median(case, SPEED):,.0f}",
        as_range(outcome.values(case, SPEED)),
        as_ratio(outcome.ratio(case, base, SPEED)),
    ]
