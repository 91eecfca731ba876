"""One table, as text for a screen and in Markdown for a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

#: Of lines in files, where nothing needs to be wrapped.
TABLE_WIDTH: Final = 200


def as_markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1
) -> str:
    """Returns a table in Markdown; the first `num_texts` columns hold no numbers."""
    numbers = len(columns) - num_texts
    lines = [columns, ["---"] * num_texts + ["---:"] * numbers, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1
) -> Table:
    """Returns a table for a console; arguments as of `as_markdown`."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table
