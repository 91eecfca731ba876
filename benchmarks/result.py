"""Benchmark results: a table on the terminal, and a folder with two files.

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

from benchmarks.support.machine import machine_facts
from benchmarks.support.tables import TABLE_WIDTH, as_markdown, as_table
from envserve.bench.interleaved import Measurements, Metric

Column = Callable[[Measurements, str], str]
"""Function that returns the text of the column's cell for a case."""


def median(number: Metric, form: str = ",.0f") -> Column:
    """Return a column with the median of a metric over the repetitions."""
    return lambda measured, case: f"{measured.median(case, number):{form}}"


def spread(number: Metric, form: str = ",.0f") -> Column:
    """Return a column with the lowest and the highest value of a metric."""

    def cell(measured: Measurements, case: str) -> str:
        values = measured.values(case, number)
        return f"{min(values):{form}} - {max(values):{form}}"

    return cell


def ratio(base: str | Callable[[str], str], number: Metric) -> Column:
    """Return a column of ratios to a base case; a dash if the base was not measured.

    `base` is the name of the base case, or a function that maps a case to this name.
    """

    def cell(measured: Measurements, case: str) -> str:
        name = base if isinstance(base, str) else base(case)
        value = measured.ratio(case, name, number)
        return "-" if value is None else f"{value:.2f}"

    return cell


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a sub-command.

    Attributes:
      columns: Maps headings to columns of the table, except the first column, which
      names the case.
      shown: Measurements to show in the table instead of `measured`, if any.
      results: Additional results for `result.json`.
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
    def headings(self) -> list[str]:
        """Headings of the table."""
        return [self.heading, *self.columns]

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table."""
        shown = self.shown or self.measured
        columns = self.columns.values()
        return [[c, *(cell(shown, c) for cell in columns)] for c in shown.by_case]

    @property
    def all_notes(self) -> list[str]:
        """The notes, followed by a note for each skipped case."""
        skipped = self.measured.skipped.items()
        return [*self.notes, *(f"{k}: skipped, {reason}" for k, reason in skipped)]

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        medians = {
            case: {number: self.measured.median(case, number) for number in runs[0]}
            for case, runs in self.measured.by_case.items()
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
            "table": {"columns": self.headings, "rows": self.rows},
            "notes": self.all_notes,
        }

    def as_markdown(self) -> str:
        """Return the table in Markdown, with its title and notes."""
        table = as_markdown(self.headings, self.rows)
        notes = "\n".join(f"* {note}" for note in self.all_notes)
        return f"**{self.title}**\n\n{table}\n{notes}".strip() + "\n"


def publish(result: Result, outdir: Path | None) -> None:
    """Print a result and save it, by default in a new folder in `runs/`."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = outdir or Path("runs", f"bench-{result.name}-{stamp}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.as_json(), indent=2) + "\n"
    folder.joinpath("result.json").write_text(text)
    folder.joinpath("table.md").write_text(result.as_markdown())
    table = as_table(result.headings, result.rows)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for part in (result.title, table, *result.all_notes):
        console.print(part, markup=False, highlight=False, soft_wrap=part != table)
    Console(stderr=True).print(f"Saved in {folder}", soft_wrap=True, highlight=False)
