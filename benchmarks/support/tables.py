"""Tables, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

#: Width of tables in files, in columns; wide enough to avoid wrapping.
TABLE_WIDTH: Final = 200


def as_markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1
) -> str:
    """Return a table in Markdown.

    The first `num_texts` columns contain text, and the others contain numbers.
    """
    numbers = len(columns) - num_texts
    lines = [columns, ["---"] * num_texts + ["---:"] * numbers, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1
) -> Table:
    """Return a table for a terminal; the arguments are those of `as_markdown`."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    return table


def replace_marked(path: Path, name: str, text: str) -> None:
    """Replace the text between the marks `NAME: begin` and `NAME: end` in a document.

    Raises:
      ValueError: The marks are missing.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, has_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{path}: expected {begin.strip()} and {end.strip()}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
