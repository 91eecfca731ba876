"""`straggler`: the cost of one slow env if rows are received as soon as they are ready.

Each reply contains the number of its request, so that the benchmark can
check that no reply is lost or reaches another row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.cases import envs
from benchmarks.command import NumEnvs, Repetitions, Run, Seconds, sub_command
from benchmarks.harness import BenchmarkError, Case
from benchmarks.result import median, ratio, spread
from envserve.bench.cases import BINDS, batch_env
from envserve.bench.interleaved import SPEED, Measure
from envserve.bench.workload import Workload

Array = np.ndarray[Any, Any]

_NONE_SLOW, _ONE_SLOW, _STEP = "none slow", "one slow", "one slow, step()"
_BINDS: Final[dict[str, tuple[str, ...]]] = {"in-process": (), "tcp": BINDS["tcp"]}


@sub_command
def straggler(
    run: Run,
    num_envs: NumEnvs = 32,
    milliseconds: Annotated[
        float, typer.Option(min=0.001, help="Duration of a step.")
    ] = 2.0,
    factor: Annotated[
        float, typer.Option(help="Factor by which one env is slower.")
    ] = 100.0,
    min_envs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Minimum number of rows that recv waits for. Default: 1."
        ),
    ] = None,
    seconds: Seconds = 2.0,
    repetitions: Repetitions = 3,
) -> None:
    """Measure send and recv with and without one slow env; one worker per env."""
    name, modules = "envserve/Request-v0", (envs.MODULE,)
    load = Workload(name, num_envs, num_envs, seconds, import_modules=modules)
    normal = {"load": load, "microseconds": milliseconds * 1e3}
    slow = {**normal, "factor": factor}
    cases = []
    for transport, binds in _BINDS.items():
        options = {"binds": binds, "min_envs": min_envs}
        cases += [
            Case(f"{transport}: {_NONE_SLOW}", sending, {**normal, **options}),
            Case(f"{transport}: {_ONE_SLOW}", sending, {**slow, **options}),
            Case(f"{transport}: {_STEP}", stepping_all, {**slow, "binds": binds}),
        ]
    measured = run.measure(cases, repetitions)
    replies = sum(sum(measured.values(case, "replies")) for case in measured.by_case)
    run.publish(
        title=f"{num_envs} envs, a step sleeps {milliseconds:g} ms, in one of them "
        f"{milliseconds * factor:g} ms: env steps per second",
        measured=measured,
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "/ none slow": ratio(
                lambda case: f"{case.partition(':')[0]}: {_NONE_SLOW}", SPEED
            ),
        },
        notes=[
            f"One worker per env; recv(min_envs={min_envs or 1}). Each reply "
            f"was compared with its request: {replies:,.0f} replies, none wrong."
        ],
    )


@contextlib.contextmanager
def sending(
    load: Workload,
    binds: tuple[str, ...],
    microseconds: float,
    min_envs: int | None,
    factor: float = 1.0,
) -> Iterator[Measure]:
    """Send the next request of each row as soon as its previous reply is received."""
    with batch_env(load, binds) as batch:
        requests = _Requests(load.num_envs, microseconds, factor)
        all_rows = np.arange(load.num_envs)

        def measure() -> Mapping[str, float]:
            batch.send(requests.new_requests(all_rows))
            started, steps = time.perf_counter(), 0
            while time.perf_counter() - started < load.seconds:
                rows, result = batch.recv(min_envs)
                steps += len(rows)
                requests.check(rows, result.observation, result.valid)
                batch.send(requests.new_requests(rows), rows)
            elapsed = time.perf_counter() - started
            rows, result = batch.recv(load.num_envs)  # complete all steps in progress
            requests.check(rows, result.observation, result.valid)
            return {SPEED: steps / elapsed, "replies": requests.take_count()}

        yield measure


@contextlib.contextmanager
def stepping_all(
    load: Workload, binds: tuple[str, ...], microseconds: float, factor: float
) -> Iterator[Measure]:
    """Step all rows together with `step`, which waits for the slow env each time."""
    with batch_env(load, binds) as batch:
        requests = _Requests(load.num_envs, microseconds, factor)
        all_rows = np.arange(load.num_envs)

        def measure() -> Mapping[str, float]:
            started, steps = time.perf_counter(), 0
            while time.perf_counter() - started < load.seconds:
                result = batch.step(requests.new_requests(all_rows))
                requests.check(all_rows, result.observation, result.valid)
                steps += load.num_envs
            elapsed = time.perf_counter() - started
            return {SPEED: steps / elapsed, "replies": requests.take_count()}

        yield measure


class _Requests:
    """Assigns numbers to requests, and checks the replies of each row."""

    def __init__(self, num_envs: int, microseconds: float, factor: float) -> None:
        self._requests = np.zeros((num_envs, 2), np.int64)
        self._requests[:, 1] = int(microseconds)
        self._requests[0, 1] = int(microseconds * factor)
        self._steps = np.zeros(num_envs, np.int64)
        self._next = 0
        self._count = 0

    def new_requests(self, rows: Array) -> Array:
        """Return requests with new, unique numbers as an array `[len(rows), 2]`."""
        self._requests[rows, 0] = np.arange(self._next, self._next + len(rows))
        self._next += len(rows)
        self._steps[rows] += 1
        return self._requests[rows]

    def check(self, rows: Array, observation: Array, valid: Array) -> None:
        """Compare replies `[len(rows), 2]` with the requests of their rows.

        Raises:
          BenchmarkError: A reply is wrong.
        """
        expected = np.stack([self._requests[rows, 0], self._steps[rows]], axis=1)
        wrong = np.flatnonzero((observation != expected).any(axis=1) | ~valid)
        if wrong.size:
            index = wrong[0]
            raise BenchmarkError(
                f"row {rows[index]}: expected a reply with [request, step] = "
                f"{expected[index].tolist()}; got {observation[index].tolist()}"
            )
        self._count += len(rows)

    def take_count(self) -> int:
        """Return the number of replies checked since the previous call."""
        count, self._count = self._count, 0
        return count
