"""The `envserve bench` command. Other packages add sub-commands by entry points.

The group is `envserve.benchmarks`; an entry point is a function with typer's options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import typer

from envserve.bench.case_process import BenchmarkError
from envserve.bench.images import images
from envserve.bench.scale import scale
from envserve.bench.slow_reset import slow_reset
from envserve.bench.start import start
from envserve.bench.step import step
from envserve.bench.straggler import straggler
from envserve.bench.suite import make_suite
from envserve.errors import EnvserveError

__all__ = ["main"]

Command = Callable[..., None]

_NAME = "envserve bench"
_OURS: dict[str, Command] = {
    "step": step,
    "straggler": straggler,
    "slow-reset": slow_reset,
    "images": images,
    "scale": scale,
    "start": start,
}


def main(
    arguments: Sequence[str] | None = None,
    more: Mapping[str, Command] | None = None,
) -> None:
    """Runs the sub-command that the arguments name.

    Args:
      arguments: The words of the command line; by default this process's.
      more: Further sub-commands by name, besides those of installed packages.
    """
    installed = {
        point.name: point.load() for point in entry_points(group="envserve.benchmarks")
    }
    app = _make_app({**_OURS, **installed, **(more or {})})
    try:
        app(arguments if arguments is None else list(arguments), prog_name=_NAME)
    except (BenchmarkError, EnvserveError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _make_app(commands: Mapping[str, Command]) -> typer.Typer:
    app = typer.Typer(
        help="Benchmarks, with peers beside us in the same run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, command in commands.items():
        app.command(name)(command)

    def run(words: Sequence[str]) -> Any:
        return app(list(words), prog_name=_NAME, standalone_mode=False)

    app.command("suite")(make_suite(run, commands))
    return app
