"""The benchmark command and its sub-commands. The module does not load TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from benchmarks.cases.guarantees import guarantees
from benchmarks.cases.images import images
from benchmarks.cases.scale import scale
from benchmarks.cases.slow_reset import slow_reset
from benchmarks.cases.start import start
from benchmarks.cases.step import step
from benchmarks.cases.straggler import straggler
from benchmarks.harness import BenchmarkError
from benchmarks.learning.goal import goal
from benchmarks.learning.overlap import overlap
from benchmarks.learning.profile import profile
from benchmarks.learning.sac import sac
from benchmarks.learning.simulate import simulate
from benchmarks.learning.stalls import stalls
from benchmarks.learning.train import train
from benchmarks.suite import make_suite
from benchmarks.support.processes import temporary_keys
from envserve.errors import EnvserveError

Command = Callable[..., None]

_NAME = "scripts/bench.py"
_COMMANDS: dict[str, Command] = {
    "step": step,
    "straggler": straggler,
    "slow-reset": slow_reset,
    "images": images,
    "scale": scale,
    "start": start,
    "guarantees": guarantees,
    "simulate": simulate,
    "stalls": stalls,
    "overlap": overlap,
    "profile": profile,
    "train": train,
    "sac": sac,
    "goal": goal,
}


def main(
    arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = _COMMANDS
) -> None:
    """Run the sub-command that the arguments name."""
    app = _make_app(commands)
    try:
        with temporary_keys():
            app(arguments if arguments is None else list(arguments), prog_name=_NAME)
    except (BenchmarkError, EnvserveError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _make_app(commands: Mapping[str, Command]) -> typer.Typer:
    app = typer.Typer(
        help="Benchmarks of envserve and other projects in the same run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, command in commands.items():
        app.command(name)(command)

    def run(words: Sequence[str]) -> Any:
        return app(list(words), prog_name=_NAME, standalone_mode=False)

    app.command("suite")(make_suite(run))
    return app
