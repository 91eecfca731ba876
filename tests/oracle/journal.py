"""A file to which each process appends the actions that its envs applied.

Each action is one `write` to a file opened for appending, so it is recorded even if the
process is killed immediately afterwards. Journals therefore show which actions were
applied, independently of any result.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

#: One applied action: the env's seed, the episode since the seed was set, and the step
#: in the episode (from 1).
RECORD: Final = np.dtype(
    [
        ("seed", "<u8"),
        ("episode", "<u4"),
        ("step", "<u4"),
        ("action", "<u4"),
        ("pid", "<u4"),
    ]
)
_PACK: Final = struct.Struct("<QIIII").pack


class Writer(Protocol):
    """The interface of a journal to which an env writes."""

    def write(self, seed: int, episode: int, step: int, action: int) -> None:
        """Append one action."""

    def close(self) -> None:
        """Close the journal."""


class Journal:
    """This process's journal file in a folder; several writers may share it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        os.makedirs(folder, exist_ok=True)
        self._pid = os.getpid()
        self._fd = os.open(
            os.path.join(folder, f"{self._pid}.journal"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )

    def write(self, seed: int, episode: int, step: int, action: int) -> None:
        """Append one action; raise OSError if the disk is full."""
        record = _PACK(seed, episode, step, action, self._pid)
        if os.write(self._fd, record) != RECORD.itemsize:
            raise OSError("a journal record was written partially; the disk is full")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_journal(folder: str | os.PathLike[str]) -> Array:
    """Return the records of all journals in a folder, `RECORD` `[n]`.

    The records of one process are in the order in which they were written.

    Raises:
      ValueError: A record is incomplete.
    """
    records = [np.zeros(0, RECORD)]
    for path in sorted(Path(folder).glob("*.journal")):
        data = path.read_bytes()
        if len(data) % RECORD.itemsize:
            raise ValueError(
                f"{path}: expected whole records of {RECORD.itemsize} bytes; "
                f"got {len(data)} bytes; the last record is incomplete"
            )
        records.append(np.frombuffer(data, RECORD))
    return np.concatenate(records)
