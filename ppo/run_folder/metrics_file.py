"""Read and truncate a run's `metrics.jsonl`.

The file of a run that was killed may end with an incomplete line, which is ignored, or
with rows of iterations after the newest checkpoint. When the run is resumed, such lines
and rows are removed first.
"""

import json
import math
from pathlib import Path
from typing import Any

from envserve.regular_file import open_no_link, open_regular
from ppo.errors import RunFolderError
from ppo.user_code import check_metric_names

#: Maximum size of the file, which is enough for millions of rows.
_MAX_BYTES = 1 << 30


def truncate_after(path: Path, iteration: int) -> None:
    """Remove the rows after an iteration from the file, if it exists.

    Raises:
      OSError: The file cannot be read or written.
    """
    if not path.exists():
        return
    num_kept_bytes = 0
    # A stranger's run may contain a link to another file, which would be truncated.
    with open_regular(path, _MAX_BYTES, follow_links=False) as file:
        for line in file:
            row = _complete_row(line) if line.endswith(b"\n") else None
            if row is None or row.get("iteration", 0) > iteration:
                break
            num_kept_bytes += len(line)
    with open(path, "r+b", opener=open_no_link) as file:
        file.truncate(num_kept_bytes)


def last_iteration(path: Path) -> int:
    """Return the last reported iteration, or 0 if there are no rows or no file.

    Raises:
      RunFolderError: The file cannot be read.
    """
    rows = _complete_rows(path) if path.exists() else []
    return int(rows[-1].get("iteration", 0)) if rows else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run; `steps` never decreases from row to row.

    Returns:
      A non-empty list of rows. Each row is a dict from metric names to values;
      non-finite values are None.

    Raises:
      RunFolderError: The file cannot be read, or has no complete row.
    """
    rows = _complete_rows(path)
    if not rows:
        raise RunFolderError(
            f"{path}: expected the metrics of at least one iteration, found none; "
            "start or resume the run first."
        )
    return rows


def _complete_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with open_regular(path, _MAX_BYTES) as file:
            return [row for row in map(_complete_row, file) if row is not None]
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot read the metrics; {error.strerror or error}."
        ) from error


def _complete_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if it is incomplete or not a row of numbers."""
    try:
        row = json.loads(line)
        known = {name: value for name, value in row.items() if value is not None}
        is_row = "steps" in known and all(map(math.isfinite, known.values()))
        is_row = is_row and row.get("iteration", 0) is not None
        check_metric_names(row)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return row if is_row else None
