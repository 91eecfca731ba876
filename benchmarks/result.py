"""A benchmark's result: a table on the screen, and a folder that keeps everything.

result.json    machine, options, all repetitions, medians, the table
table.md       the table in Markdown
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lab.machine import machine_facts
from benchmarks.lab.tables import TABLE_WIDTH, as_markdown, as_table
from envserve.bench.interleaved import Measurements, Metric

Column = Callable[[Measurements, str], str]
"""Makes the cell of a case."""


def median(number: Metric, form: str = ",.0f") -> Column:
    """Returns a column of medians."""
    return lambda measured, case: f"{measured.median(case, number):{form}}"


def spread(number: Metric, form: str = ",.0f") -> Column:
    """Returns a column with the lowest and the highest."""

    def cell(measured: Measurements, case: str) -> str:
        values = measured.values(case, number)
        return f"{min(values):{form}} - {max(values):{form}}"

    return cell


def ratio(base: str | Callable[[str], str], number: Metric) -> Column:
    """Returns a column of ratios to another case, which may depend on the case.

    A dash stands where it was not measured.
    """

    def cell(measured: Measurements, case: str) -> str:
        name = base if isinstance(base, str) else base(case)
        value = measured.ratio(case, name, number)
        return "-" if value is None else f"{value:.2f}"

    return cell


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a sub-command has found out.

    Attributes:
      columns: The table's, by head, without the first, which names the row.
      shown: Whose numbers the table shows, where not those measured.
      results: What else came out, for the JSON file.
    """

    name: str
    options: Mapping[str, Any]
    title: str
    measured: Measurements
    columns: Mapping[str, Column]
    shown: Measurements | None = None
    heading: str = "case"
    notes: Sequence[str] = ()
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> list[str]:
        """Heads of the table."""
        return [self.heading, *self.columns]

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the table."""
        shown = self.shown or self.measured
        columns = self.columns.values()
        return [[c, *(cell(shown, c) for cell in columns)] for c in shown.by_case]

    @property
    def all_notes(self) -> list[str]:
        """The notes, and what was left out."""
        skipped = self.measured.skipped.items()
        return [*self.notes, *(f"{name}: skipped, {why}" for name, why in skipped)]

    def as_json(self) -> dict[str, Any]:
        """Returns everything, in plain values."""
        medians = {
            case: {number: self.measured.median(case, number) for number in turns[0]}
            for case, turns in self.measured.by_case.items()
        }
        return {
            "benchmark": self.name,
            "title": self.title,
            "finished": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
            "machine": machine_facts(),
            "options": self.options,
            "repetitions": self.measured.by_case,
            "medians": medians,
            "skipped": self.measured.skipped,
            "results": self.results,
            "table": {"columns": self.heads, "rows": self.rows},
            "notes": self.all_notes,
        }

    def as_markdown(self) -> str:
        """Returns the table in Markdown, with its title and notes."""
        table = as_markdown(self.heads, self.rows)
        notes = "\n".join(f"* {note}" for note in self.all_notes)
        return f"**{self.title}**\n\n{table}\n{notes}".strip() + "\n"


def publish(result: Result, outdir: Path | None) -> None:
    """Prints a result and saves it, by default in a new folder in runs/."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = outdir or Path("runs", f"bench-{result.name}-{stamp}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.as_json(), indent=2) + "\n"
    folder.joinpath("result.json").write_text(text)
    folder.joinpath("table.md").write_text(result.as_markdown())
    table = as_table(result.heads, result.rows)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for part in (result.title, table, *result.all_notes):
        console.print(part, markup=False, highlight=False, soft_wrap=part != table)
    Console(stderr=True).print(f"Saved in {folder}", soft_wrap=True, highlight=False)
