"""The command `scripts/chaos.py`: injects faults of every kind and verifies every row.

The exit code is 0 if no row was wrong and no case failed, even if a goal was missed.
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

from benchmarks.support.processes import temporary_keys
from benchmarks.support.tables import TABLE_WIDTH, as_table
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

#: Seconds between the time limit of a hanging case and its termination.
_KILL_AFTER_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(chaos)
    app(arguments if arguments is None else list(arguments), prog_name="chaos.py")


def chaos(
    cases: Annotated[
        list[str] | None,
        typer.Argument(help="Case names or their prefixes. Default: all cases."),
    ] = None,
    scale: Annotated[
        float, typer.Option(min=1e-6, help="Share of the full number of faults.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Random seed. Default: a random one.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the cases.")] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Inject some faults into other projects' vectorised envs."
        ),
    ] = False,
    corruption: Annotated[
        bool,
        typer.Option(
            "--plant", help="Corrupt a row in each case, to verify that it is detected."
        ),
    ] = False,
    outdir: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: runs/chaos-TIME."),
    ] = None,
) -> None:
    """Inject faults, and verify that no transition is wrong."""
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
        with temporary_keys():
            is_sound = _run_cases(chosen, folder, scale, seed, corruption)
    if peers:
        _run_peers(folder, seed)
    _log(f"Saved in {folder}; all tables are in {folder / 'tables.md'}")
    raise typer.Exit(0 if is_sound else 1)


def chosen_cases(words: Sequence[str]) -> list[ChaosCase]:
    """Return the cases that match a name or prefix, or all cases if none is given.

    Raises:
      typer.BadParameter: No case matches a name or prefix.
    """
    for word in words:
        if not any(case.name.startswith(word) for case in CASES):
            names = ", ".join(case.name for case in CASES)
            raise typer.BadParameter(
                f"unknown case {word!r}; expected a name or a prefix of {names}"
            )
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
        limit = case.max_seconds(scale)
        _log(f"... {case.name}: {case.fault} (at most {limit:.0f} s)")
        result = _run(case, folder, scale, seed, corruption)
        options = {"scale": scale, "seed": seed, "plant": corruption}
        options["position"] = CASES.index(case)
        save_case(folder, case, result, options)
        _print_result(case, result)
        is_sound &= result.is_sound
    return is_sound


def _run(
    case: ChaosCase, folder: Path, scale: float, seed: int, corruption: bool
) -> CaseResult:
    """Run a case in its own process."""
    seconds = case.max_seconds(scale) + _KILL_AFTER_SECONDS
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

    rows = peer_rows(lambda text: _log(f"... {text}"), seed)
    save_peers(folder, rows, {"seed": seed})
    _console().print(as_table(PEER_COLUMNS, rows, 4))


def _print_result(case: ChaosCase, result: CaseResult) -> None:
    words = {"case": case.name, "does": case.fault, "goal": case.goal}
    facts = {**words, **result.as_json()}
    numbers = zip(COLUMNS[4:], row_of(facts)[4:], strict=True)
    text = ", ".join(f"{name} {cell}" for name, cell in numbers)
    for line in (f"{case.name}: {result.verdict}; {text}", *notes_of(facts)):
        _console().print(line, markup=False, highlight=False, soft_wrap=True)


def _print_list() -> None:
    rows = [[case.name, case.fault, case.goal] for case in CASES]
    _console().print(as_table(["case", "fault", "goal"], rows, 3))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _log(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
