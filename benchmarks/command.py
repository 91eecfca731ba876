"""Parts that all sub-commands share: options, measurements and results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from benchmarks.harness import BenchmarkError, Case, chosen, measure_cases
from benchmarks.result import Result, publish
from envserve.bench.interleaved import Measurements
from envserve.host_resources import num_cores

CORES: Final = num_cores()
EnvName = Annotated[str, typer.Option(help="Registered name of the env.")]
NumEnvs = Annotated[int, typer.Option(min=1, help="Number of envs in the batch.")]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes that step envs.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Seconds per measurement.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Measurements per case.")]


@dataclass(frozen=True)
class Run:
    """One run of a sub-command.

    Attributes:
      name: Name of the sub-command.
      options: Values of its options, which the result contains.
      only: Substrings of the names of cases to measure; empty for all cases.
      outdir: Folder for the result; None for a new folder.
    """

    name: str
    options: Mapping[str, Any]
    only: Sequence[str]
    outdir: Path | None

    def measure(self, cases: Sequence[Case], repetitions: int) -> Measurements:
        """Measure the selected cases alternately."""
        return measure_cases(chosen(cases, self.only), repetitions, print_progress)

    def measure_all(self, cases: Sequence[Case], repetitions: int) -> Measurements:
        """Measure cases whose results are only meaningful together.

        Raises:
          BenchmarkError: A case was skipped, or excluded by `only`.
        """
        measured = self.measure(cases, repetitions)
        if len(measured.by_case) < len(cases):
            reasons = "; ".join(measured.skipped.values()) or "omit --only"
            raise BenchmarkError(f"{self.name} needs all of its cases: {reasons}")
        return measured

    def publish(self, **fields: Any) -> None:
        """Print and save a `Result`; its name and options are those of the run."""
        publish(Result(name=self.name, options=self.options, **fields), self.outdir)


def print_progress(text: str) -> None:
    """Print a progress message to stderr."""
    Console(stderr=True).print(text, markup=False, highlight=False)


def sub_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that also has the options `--only` and `--outdir`.

    The arguments of `function` are a `Run`, followed by the other options.
    """

    def common(
        context: typer.Context,
        only: Annotated[
            list[str] | None,
            typer.Option(
                help="Substring of the names of cases to measure; can be repeated."
            ),
        ] = None,
        outdir: Annotated[
            Path | None,
            typer.Option(help="Folder for the result. Default: runs/bench-NAME-TIME."),
        ] = None,
        **specific: Any,
    ) -> None:
        options = {k: v for k, v in context.params.items() if k != "outdir"}
        function(Run(str(context.info_name), options, only or (), outdir), **specific)

    context, *shared, _ = inspect.signature(common, eval_str=True).parameters.values()
    _, *specific = inspect.signature(function, eval_str=True).parameters.values()
    command = functools.wraps(function)(common)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [context, *specific, *shared]
    )
    return command
