"""Options that several sub-commands have, and how their numbers look in tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from envserve.cores import num_cores

__all__ = [
    "CORES",
    "JsonFile",
    "Markdown",
    "NumEnvs",
    "Only",
    "OutDir",
    "Repetitions",
    "Seconds",
    "Workers",
    "announcer",
    "as_range",
    "as_ratio",
    "options_of",
]

CORES: Final = num_cores()

NumEnvs = Annotated[int, typer.Option(min=1, help="Rows of the batch.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that step envs.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Length of a measurement.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Turns that each case gets.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Part of the name of a case to measure; repeatable."),
]
OutDir = Annotated[
    Path | None,
    typer.Option(help="Folder for the result. Default: runs/bench-NAME-TIME."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="File for a copy of result.json.")
]
Markdown = Annotated[bool, typer.Option(help="Print the table in Markdown.")]


def announcer() -> Callable[[str], None]:
    """Returns a function that prints to stderr what is going on."""
    console = Console(stderr=True)
    return lambda text: console.print(f"... {text}", markup=False, highlight=False)


def as_ratio(value: float | None) -> str:
    """Returns a ratio for a cell; a dash where it could not be had."""
    return "-" if value is None else f"{value:.2f}"


def as_range(values: list[float], form: str = ",.0f") -> str:
    """Returns the lowest and the highest for a cell."""
    return f"{min(values):{form}} - {max(values):{form}}"


def options_of(context: typer.Context) -> dict[str, Any]:
    """Returns what a sub-command was asked for, but not where its result goes."""
    elsewhere = ("outdir", "json_file", "markdown")
    return {k: v for k, v in context.params.items() if k not in elsewhere}
