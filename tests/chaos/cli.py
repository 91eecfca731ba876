"""`scripts/chaos.py`: faults of every kind, in large numbers, under the oracle's eyes.

Exit code 0: no row was wrong and nothing failed, though a goal may have been missed.
"""

from __future__ import annotations

import datetime
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.lab.processes import own_keys
from benchmarks.lab.tables import TABLE_WIDTH, as_table
from tests.chaos.case_result import CaseResult
from tests.chaos.case_tables import (
    COLUMNS,
    PEER_COLUMNS,
    notes_of,
    row_of,
    save_case,
    save_peers,
)
from tests.chaos.cases.table import CASES
from tests.chaos.isolated import DidNotEnd, run_isolated
from tests.chaos.trial import ChaosCase, RowCorruption, run_case

#: After its own time is over, a case that hangs is killed.
_MORE_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(chaos)
    app(arguments if arguments is None else list(arguments), prog_name="chaos.py")


def chaos(
    cases: Annotated[
        list[str] | None,
        typer.Argument(help="Cases, or beginnings of their names. Default: all."),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=1e-6, help="Share of the full counts.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Of all that is drawn. Default: a new one.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Name the cases.")] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Try some faults on other projects' vectorised envs."
        ),
    ] = False,
    corruption: Annotated[
        bool,
        typer.Option("--plant", help="Plant a wrong row, to see each case notice it."),
    ] = False,
    outdir: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: runs/chaos-TIME."),
    ] = None,
) -> None:
    """Make things fail, and show that no transition is wrong and what it costs."""
    if list_only:
        _print_list()
        return
    seed = secrets.randbelow(2**31) if seed is None else seed
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = outdir or Path("runs", f"chaos-{stamp}")
    folder.mkdir(parents=True, exist_ok=True)
    is_sound = True
    if cases or not peers:
        chosen = chosen_cases(cases or [])
        with own_keys():
            is_sound = _run_cases(chosen, folder, scale, seed, corruption)
    if peers:
        _run_peers(folder, seed)
    _say(f"Saved in {folder}; all tables are in {folder / 'tables.md'}")
    raise typer.Exit(0 if is_sound else 1)


def chosen_cases(words: Sequence[str]) -> list[ChaosCase]:
    """Returns the cases whose names are, or begin with, one of some words; or all.

    Raises:
      typer.BadParameter: There is no such case.
    """
    for word in words:
        if not any(case.name.startswith(word) for case in CASES):
            names = ", ".join(case.name for case in CASES)
            raise typer.BadParameter(f"expected some of {names}; got {word!r}")
    exact = {case.name for case in CASES} & set(words)
    return [
        case
        for case in CASES
        if not words
        or case.name in exact
        or any(case.name.startswith(word) for word in set(words) - exact)
    ]


def _run_cases(
    cases: Sequence[ChaosCase], folder: Path, scale: float, seed: int, corruption: bool
) -> bool:
    is_sound = True
    for case in cases:
        _say(f"... {case.name}: {case.does} (at most {case.most_seconds(scale):.0f} s)")
        result = _run(case, folder, scale, seed, corruption)
        position = CASES.index(case)
        options = {
            "scale": scale,
            "seed": seed,
            "plant": corruption,
            "position": position,
        }
        save_case(folder, case, result, options)
        _print_result(case, result)
        is_sound &= result.is_sound
    return is_sound


def _run(
    case: ChaosCase, folder: Path, scale: float, seed: int, corruption: bool
) -> CaseResult:
    """Runs a case in a process of its own; a seed makes it draw the same again."""
    seconds = case.most_seconds(scale) + _MORE_SECONDS
    log = folder / f"{case.name}.log"
    try:
        result = run_isolated(
            _run_named, case.name, scale, seed, corruption, seconds=seconds, log=log
        )
    except DidNotEnd as error:
        repeat = f"chaos.py {case.name} --seed {seed} --scale {scale:g}"
        result = CaseResult(error=f"{error}; repeat it with: {repeat}")
    assert isinstance(result, CaseResult)
    return result


def _run_named(name: str, scale: float, seed: int, corruption: bool) -> CaseResult:
    (case,) = (case for case in CASES if case.name == name)
    planted = RowCorruption() if corruption else None
    return run_case(case, seed=seed, scale=scale, corruption=planted)


def _run_peers(folder: Path, seed: int) -> None:
    from tests.chaos.peers import peer_rows

    rows = peer_rows(lambda text: _say(f"... {text}"), seed)
    save_peers(folder, rows, {"seed": seed})
    _console().print(as_table(PEER_COLUMNS, rows, 4))


def _print_result(case: ChaosCase, result: CaseResult) -> None:
    words = {"case": case.name, "does": case.does, "goal": case.goal}
    facts = {**words, **result.as_json()}
    numbers = zip(COLUMNS[4:], row_of(facts)[4:], strict=True)
    text = ", ".join(f"{name} {cell}" for name, cell in numbers)
    for line in (f"{case.name}: {result.verdict}; {text}", *notes_of(facts)):
        _console().print(line, markup=False, highlight=False, soft_wrap=True)


def _print_list() -> None:
    rows = [[case.name, case.does, case.goal] for case in CASES]
    _console().print(as_table(["case", "what is done", "goal"], rows, 3))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
