"""`suite`: run all benchmarks, and write one file with all tables.

Several runs can write to the same folder; the file contains the tables of all parts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from benchmarks.goals import goals_table
from benchmarks.harness import BenchmarkError
from benchmarks.support.machine import describe_machine
from envserve.errors import EnvserveError

_CARTPOLE: Final = ("--env", "CartPole-v1", "--num-envs")
#: Options that exclude SB3 and Tianshou, which would import large packages in each of
#: 256 processes.
_LIGHT: Final = tuple(
    part
    for name in ("limit", "envserve", "gymnasium", "EnvPool")
    for part in ("--only", name)
)

#: With large minibatches, a trainer mostly waits for the envs.
_LARGE_MINIBATCHES: Final = ("--minibatch-size", "2048")

#: Maps each part to its command line. The folder of a part's result is named like the
#: part.
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "step-cheetah-16": ("step", "--num-envs", "16"),
    "step-cheetah-64": ("step", "--num-envs", "64"),
    "step-cartpole-64": ("step", *_CARTPOLE, "64"),
    "step-cartpole-256": ("step", *_CARTPOLE, "256", *_LIGHT),
    "guarantees": ("guarantees",),
    "train": ("train",),
    "train-64": ("train", "--num-envs", "64"),
    "train-sb3-16": ("train", "--only", "SB3", *_LARGE_MINIBATCHES),
    "train-sb3-64": ("train", "--only", "SB3", "--num-envs", "64", *_LARGE_MINIBATCHES),
    "sac": ("sac",),
    "simulate-cartpole-16": ("simulate", *_CARTPOLE, "16"),
    "simulate-cartpole-64": ("simulate", *_CARTPOLE, "64"),
    "simulate-cheetah-16": ("simulate", "--env", "HalfCheetah-v5"),
    "simulate-cheetah-64": ("simulate", "--env", "HalfCheetah-v5", "--num-envs", "64"),
    "stalls": ("stalls",),
    "overlap": ("overlap",),
    "straggler": ("straggler",),
    "slow-reset": ("slow-reset",),
    "slow-reset-staggered": ("slow-reset", "--staggered", "--episodes", "1"),
    "images": ("images",),
    "scale": ("scale",),
    "start": ("start",),
    "profile-cheetah-16": ("profile",),
    "profile-cheetah-64-tcp": ("profile", "--num-envs", "64", "--transport", "tcp"),
}


def make_suite(run: Callable[[Sequence[str]], Any]) -> Callable[..., None]:
    """Return the sub-command `suite`; `run` runs the command line of a part."""

    def suite(
        part: Annotated[
            list[str] | None, typer.Option(help="Run only this part; can be repeated.")
        ] = None,
        outdir: Annotated[
            Path | None,
            typer.Option(
                help="Folder for all results. Default: runs/bench-suite-TIME."
            ),
        ] = None,
    ) -> None:
        """Run all benchmarks (10 to 25 minutes), and write all tables into one file."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = outdir or Path("runs", f"bench-suite-{stamp}")
        console = Console(stderr=True)
        names = part or list(PARTS)
        for name in names:
            if name not in PARTS:
                raise BenchmarkError(
                    f"--part: expected one of {', '.join(PARTS)}; got {name!r}"
                )
        failed = []
        for name in names:
            command = PARTS[name]
            console.rule(f"scripts/bench.py {' '.join(command)}")
            try:
                run([*command, "--outdir", str(folder / name)])
            except (BenchmarkError, EnvserveError) as error:
                failed.append(name)
                text = f"{name}: failed, {error}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(folder)
        console.print(f"All tables are in {folder / 'tables.md'}", soft_wrap=True)
        if failed:
            console.print(f"Failed: {', '.join(failed)}", soft_wrap=True)
            raise typer.Exit(1)

    return suite


def write_tables(folder: Path) -> None:
    """Write `tables.md`: the goals, and the tables of all parts in a folder."""
    results = {
        name: json.loads((folder / name / "result.json").read_text())
        for name in PARTS
        if (folder / name / "result.json").exists()
    }
    sections = []
    if results:
        machine = next(iter(results.values()))["machine"]
        sections = [describe_machine(machine), goals_table(results)]
    for name in results:
        table = (folder / name / "table.md").read_text()
        sections.append(f"`scripts/bench.py {' '.join(PARTS[name])}`\n\n{table}")
    folder.joinpath("tables.md").write_text("\n".join(sections))
