"""A benchmark's result: a table on the screen, and a folder that keeps everything.

result.json    machine, options, all repetitions, medians, the table
table.txt      the table as text
table.md       the table in Markdown
plot.png       its plot, where matplotlib is installed
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
from benchmarks.plot import Plot, save_plot
from envserve.bench.turns import Measurements, Number

__all__ = ["Column", "Output", "Result", "median", "publish", "ratio", "spread"]

Column = Callable[[Measurements, str], str]
"""Makes the cell of a case."""


def median(number: Number, form: str = ",.0f") -> Column:
    """Returns a column of medians."""
    return lambda measured, case: f"{measured.median(case, number):{form}}"


def spread(number: Number, form: str = ",.0f") -> Column:
    """Returns a column with the lowest and the highest."""

    def cell(measured: Measurements, case: str) -> str:
        values = measured.values(case, number)
        return f"{min(values):{form}} - {max(values):{form}}"

    return cell


def ratio(base: str | Callable[[str], str], number: Number) -> Column:
    """Returns a column of ratios to another case, which may depend on the case.

    A dash stands where it was not measured.
    """

    def cell(measured: Measurements, case: str) -> str:
        name = base if isinstance(base, str) else base(case)
        value = measured.ratio(case, name, number)
        return "-" if value is None else f"{value:.2f}"

    return cell


@dataclass(frozen=True)
class Output:
    """Where a result goes.

    Attributes:
      outdir: Its folder; None for a new one in runs/.
      json_file: A file for a copy of result.json.
      markdown: Whether the screen gets Markdown, ready to be pasted.
    """

    outdir: Path | None = None
    json_file: Path | None = None
    markdown: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a sub-command has found out.

    Attributes:
      name: The sub-command.
      options: What it was asked for.
      title: A line that says what was measured.
      measured: All numbers.
      columns: The table's, by head, without the first, which names the row.
      plot: What to draw.
      shown: Whose numbers the table and the plot show, where not those measured.
      heading: Head of the first column.
      notes: Lines below the table.
      results: What else came out, for the JSON file.
    """

    name: str
    options: Mapping[str, Any]
    title: str
    measured: Measurements
    columns: Mapping[str, Column]
    plot: Plot
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

    def print_to(self, console: Console) -> None:
        """Prints the table, with its title and notes."""
        table = as_table(self.heads, self.rows)
        for part in (self.title, table, *self.all_notes):
            console.print(part, markup=False, highlight=False, soft_wrap=part != table)


def publish(result: Result, output: Output) -> Path:
    """Prints a result and saves it; returns its folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = output.outdir or Path("runs", f"bench-{result.name}-{stamp}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.as_json(), indent=2) + "\n"
    folder.joinpath("result.json").write_text(text)
    if output.json_file is not None:
        output.json_file.write_text(text)
    folder.joinpath("table.md").write_text(result.as_markdown())
    with folder.joinpath("table.txt").open("w") as file:
        result.print_to(Console(file=file, width=TABLE_WIDTH))
    shown = result.shown or result.measured
    reason = save_plot(result.plot, shown, result.title, folder / "plot.png")
    if output.markdown:
        print(result.as_markdown(), end="")
    else:
        result.print_to(Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    if reason:
        Console(stderr=True).print(f"plot: skipped, {reason}", markup=False)
    Console(stderr=True).print(f"Saved in {folder}", soft_wrap=True, highlight=False)
    return folder
