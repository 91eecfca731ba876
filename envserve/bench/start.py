"""`bench start`: what a user waits for, each time in a fresh process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Final

import typer

from envserve.bench.case_process import Case, Measure
from envserve.bench.harness import Outcome, chosen, take_turns
from envserve.bench.options import (
    JsonFile,
    Markdown,
    NumEnvs,
    Only,
    OutDir,
    Repetitions,
    Workers,
    announcer,
    as_range,
    options_of,
)
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from envserve.lab.servers import start_command

__all__ = ["start"]

_SECONDS: Final = "seconds"
_TIMED: Final = """
import time
began = time.perf_counter()
{code}
print(time.perf_counter() - began)
"""
_OURS: Final = """
from envserve.client import BatchEnv
batch = BatchEnv.local({env!r}, {num_envs}, {workers}, seed=0)
batch.reset()
"""
_ASYNC: Final = """
import gymnasium
envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make({env!r})] * {num_envs})
envs.reset(seed=0)
"""


def start(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="Registered name.")] = "HalfCheetah-v5",
    num_envs: NumEnvs = 64,
    workers: Workers = 16,
    repetitions: Repetitions = 3,
    only: Only = None,
    outdir: OutDir = None,
    json_file: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Measure seconds until the first observation, of imports, and of a server."""
    fill = {"env": env, "num_envs": num_envs, "workers": workers}
    ours = {"code": _OURS.format(**fill), "after": "batch.close()"}
    theirs = {"code": _ASYNC.format(**fill), "after": "envs.close()"}
    cases = [
        Case("envserve, first observation", fresh_script, ours),
        Case("gymnasium AsyncVectorEnv, first observation", fresh_script, theirs),
        Case(
            "import envserve.client", fresh_script, {"code": "import envserve.client"}
        ),
        Case("import gymnasium", fresh_script, {"code": "import gymnasium"}),
        Case("envserve start, ready line", ready_line),
    ]
    outcome = take_turns(chosen(cases, only or []), repetitions, announcer())
    report = Report(
        name="start",
        title=f"Seconds to start; first observations of {num_envs} {env}, ours in "
        f"{workers} workers",
        options=options_of(context),
        outcome=outcome,
        columns=["case", "seconds", "lowest - highest"],
        rows=[_row(outcome, case) for case in outcome.measured],
        notes=[
            "First observation: from the first line of a fresh script, imports "
            "included. Ready line: from the start of the process."
        ],
        plot=Plot(
            "seconds",
            outcome.all_values(_SECONDS),
        ),
    )
    publish(report, Output(outdir, json_file, markdown))


@contextlib.contextmanager
def fresh_script(code: str, after: str = "") -> Iterator[Measure]:
    """Runs a script in a new interpreter; it is timed from its first line."""
    script = _TIMED.format(code=code.strip()) + after
    yield lambda: _seconds(lambda: _printed_number(script))


@contextlib.contextmanager
def ready_line() -> Iterator[Measure]:
    """Starts a server, and ends it once it says that it is ready."""
    yield lambda: _seconds(_time_to_ready_line)


def _seconds(run: Callable[[], float]) -> Mapping[str, float]:
    return {_SECONDS: run()}


def _printed_number(script: str) -> float:
    command = [sys.executable, "-W", "ignore", "-c", script]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _time_to_ready_line() -> float:
    command = start_command("--bind", "tcp://127.0.0.1:0", "--log-level", "warning")
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed = time.perf_counter() - began
        process.terminate()
    if not line:
        raise RuntimeError(f"expected a ready line of {command}; got none")
    return elapsed


def _row(outcome: Outcome, case: str) -> list[str]:
    return [
        case,
        f"{outcome.median(case, _SECONDS):.2f}",
        as_range(outcome.values(case, _SECONDS), ".2f"),
    ]
