"""Reads the `metrics.jsonl` of a run, however that run has ended.

A run that was killed may leave a line that is cut, which is not read, and iterations
after its newest checkpoint. A run that is resumed first cuts both off.
"""

import json
import os
from pathlib import Path
from typing import Any

from ppo.errors import RunFolderError


def truncate_after(path: Path, iteration: int) -> None:
    """Shorten the file, if there is one, to the rows of an iteration and those before.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    kept = 0
    for line in content.splitlines(keepends=True):
        row = _complete_row(line) if line.endswith(b"\n") else None
        if row is None or row.get("iteration", 0) > iteration:
            break
        kept += len(line)
    if kept < len(content):
        os.truncate(path, kept)


def last_iteration(path: Path) -> int:
    """Return the last iteration that was reported; 0 if there is none, or no file.

    Raises:
        OSError: the file cannot be read.
    """
    rows = _complete_rows(path) if path.exists() else []
    return int(rows[-1].get("iteration", 0)) if rows else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a run; `steps` never falls from one to the next.

    Returns:
        At least one row: numbers by name, None where a number was not finite.

    Raises:
        RunFolderError: the file cannot be read, or has no complete row.
    """
    try:
        rows = _complete_rows(path)
    except OSError as error:
        raise RunFolderError(
            f"{path}: expected the metrics of a run; {error.strerror or error}."
        ) from error
    if not rows:
        raise RunFolderError(
            f"{path}: expected the metrics of at least one iteration, found none; "
            "train the run first."
        )
    return rows


def _complete_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines()
    return [row for row in map(_complete_row, lines) if row is not None]


def _complete_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None for one that a killed run has cut."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("steps"), int | float)
    return row if is_row else None
