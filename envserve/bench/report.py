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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from envserve.bench.harness import Outcome
from envserve.bench.plot import Plot, save_plot
from envserve.lab.machine import machine_facts
from envserve.lab.tables import TABLE_WIDTH, as_markdown, as_table

__all__ = ["Output", "Report", "publish"]


@dataclass(frozen=True)
class Output:
    """Where a report goes.

    Attributes:
      outdir: Its folder; None for a new one in runs/.
      json_file: A file for a copy of result.json.
      markdown: Whether the screen gets Markdown, ready to be pasted.
    """

    outdir: Path | None = None
    json_file: Path | None = None
    markdown: bool = False


@dataclass(frozen=True)
class Report:
    """What a sub-command has found out.

    Attributes:
      name: The sub-command.
      title: A line that says what was measured.
      options: What it was asked for.
      outcome: All numbers.
      columns: Heads of the table; the first column names the row.
      rows: Its cells.
      notes: Lines below it.
      plot: What to draw.
      results: What else came out, for the JSON file.
    """

    name: str
    title: str
    options: Mapping[str, Any]
    outcome: Outcome
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    plot: Plot
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_notes(self) -> list[str]:
        """The notes, and what was left out."""
        skipped = self.outcome.skipped.items()
        return [*self.notes, *(f"{name}: skipped, {why}" for name, why in skipped)]

    def as_json(self) -> dict[str, Any]:
        """Returns everything, in plain values."""
        return {
            "benchmark": self.name,
            "title": self.title,
            "finished": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
            "machine": machine_facts(),
            "options": dict(self.options),
            "repetitions": self.outcome.measured,
            "medians": self.outcome.medians(),
            "skipped": self.outcome.skipped,
            "results": dict(self.results),
            "table": {
                "columns": list(self.columns),
                "rows": [list(r) for r in self.rows],
            },
            "notes": self.all_notes,
        }

    def as_markdown(self) -> str:
        """Returns the table in Markdown, with its title and notes."""
        table = as_markdown(self.columns, self.rows)
        notes = "\n".join(f"* {note}" for note in self.all_notes)
        return f"**{self.title}**\n\n{table}\n{notes}".strip() + "\n"

    def print_to(self, console: Console) -> None:
        """Prints the table, with its title and notes."""
        table = as_table(self.columns, self.rows)
        for part in (self.title, table, *self.all_notes):
            console.print(part, markup=False, highlight=False, soft_wrap=part != table)


def publish(report: Report, output: Output) -> Path:
    """Prints a report and saves it; returns its folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = output.outdir or Path("runs", f"bench-{report.name}-{stamp}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.as_json(), indent=2) + "\n"
    folder.joinpath("result.json").write_text(text)
    if output.json_file is not None:
        output.json_file.write_text(text)
    folder.joinpath("table.md").write_text(report.as_markdown())
    with folder.joinpath("table.txt").open("w") as file:
        report.print_to(Console(file=file, width=TABLE_WIDTH))
    reason = save_plot(report.plot, report.title, folder / "plot.png")
    if output.markdown:
        print(report.as_markdown(), end="")
    else:
        report.print_to(Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    if reason:
        Console(stderr=True).print(f"plot: skipped, {reason}", markup=False)
    Console(stderr=True).print(f"Saved in {folder}", soft_wrap=True, highlight=False)
    return folder
