"""The `envserve bench` command. Other packages add sub-commands by entry points.

The group is `envserve.benchmarks`; an entry point is a function with typer's options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points

import typer

from envserve.bench.case_process import BenchmarkError
from envserve.bench.images import images
from envserve.bench.scale import scale
from envserve.bench.slow_reset import slow_reset
from envserve.bench.start import start
from envserve.bench.step import step
from envserve.bench.straggler import straggler
from envserve.errors import EnvserveError

__all__ = ["main"]

Command = Callable[..., None]

_OURS: tuple[Command, ...] = (step, straggler, slow_reset, images, scale, start)


def main(
    arguments: Sequence[str] | None = None,
    more: Mapping[str, Command] | None = None,
) -> None:
    """Runs the sub-command that the arguments name.

    Args:
      arguments: The words of the command line; by default this process's.
      more: Further sub-commands by name, besides those of installed packages.
    """
    app = typer.Typer(
        help="Benchmarks, with peers beside us in the same run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_describe)
    for command in _OURS:
        app.command()(command)
    found = {p.name: p for p in entry_points(group="envserve.benchmarks")}
    installed = {name: point.load() for name, point in found.items()}
    for name, command in {**installed, **(more or {})}.items():
        app.command(name)(command)
    try:
        app(
            arguments if arguments is None else list(arguments),
            prog_name="envserve bench",
        )
    except (BenchmarkError, EnvserveError) as error:
        print(f"envserve bench: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _describe() -> None:
    """Benchmarks, with peers beside us in the same run."""
