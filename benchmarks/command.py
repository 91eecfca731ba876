"""What all sub-commands share: options, turns, and where the result goes."""

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
EnvName = Annotated[str, typer.Option(help="Registered name.")]
NumEnvs = Annotated[int, typer.Option(min=1, help="Rows of the batch.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that step envs.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Length of a measurement.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Turns that each case gets.")]


@dataclass(frozen=True)
class Run:
    """One run of a sub-command.

    Attributes:
      only: Words, of which a case's name must have one.
      outdir: Where its result goes; None for a new folder.
    """

    name: str
    options: Mapping[str, Any]
    only: Sequence[str]
    outdir: Path | None

    def measure(self, cases: Sequence[Case], repetitions: int) -> Measurements:
        """Measures the cases that were chosen, in turns."""
        return measure_cases(chosen(cases, self.only), repetitions, say)

    def measure_all(self, cases: Sequence[Case], repetitions: int) -> Measurements:
        """Measures cases that make no sense without each other."""
        measured = self.measure(cases, repetitions)
        if len(measured.by_case) < len(cases):
            reasons = "; ".join(measured.skipped.values()) or "leave out --only"
            raise BenchmarkError(f"{self.name} needs all of its cases: {reasons}")
        return measured

    def publish(self, **fields: Any) -> None:
        """Prints and saves the result; takes the other fields of `Result`."""
        publish(Result(name=self.name, options=self.options, **fields), self.outdir)


def say(text: str) -> None:
    """Prints to stderr what is going on."""
    Console(stderr=True).print(text, markup=False, highlight=False)


def sub_command(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a function that takes a `Run` and options the options that all have."""

    def common(
        context: typer.Context,
        only: Annotated[
            list[str] | None,
            typer.Option(help="Part of the name of a case to measure; repeatable."),
        ] = None,
        outdir: Annotated[
            Path | None,
            typer.Option(help="Folder for the result. Default: runs/bench-NAME-TIME."),
        ] = None,
        **own: Any,
    ) -> None:
        options = {k: v for k, v in context.params.items() if k != "outdir"}
        function(Run(str(context.info_name), options, only or (), outdir), **own)

    context, *shared, _ = inspect.signature(common, eval_str=True).parameters.values()
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    command = functools.wraps(function)(common)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [context, *own, *shared]
    )
    return command
