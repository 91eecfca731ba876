"""Reads the `metrics.jsonl` of a run, however that run has ended.

A run that was killed may leave a line that is cut, and one that was resumed has the
iterations after its checkpoint twice. Neither shows in what is read.
"""

import json
from pathlib import Path
from typing import Any

from ppo.errors import RunFolderError

__all__ = ["read_metrics"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a run; `steps` rises from each to the next.

    Args:
        path: the file, one JSON object per line.

    Returns:
        At least one row: numbers by name, None where a number was not finite.

    Raises:
        RunFolderError: the file cannot be read, or has no complete row.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunFolderError(
            f"{path}: expected the metrics of a run; {error.strerror or error}."
        ) from error
    rows: list[dict[str, Any]] = []
    for line in lines:
        row = _complete_row(line)
        if row is None:
            continue
        # What a resumed run does again, it has not done before.
        while rows and rows[-1]["steps"] >= row["steps"]:
            rows.pop()
        rows.append(row)
    if not rows:
        raise RunFolderError(
            f"{path}: expected the metrics of at least one iteration, found none; "
            "train the run first."
        )
    return rows


def _complete_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None for one that a killed run has cut, or gone on writing in."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("steps"), int | float)
    return row if is_row else None
