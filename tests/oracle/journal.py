"""A file to which a process appends each action that it has applied.

What is written stands, however the process ends: each action is one `write` to a file
that is open for appending. So a journal tells what was done, and no result does.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

#: One applied action: the env's seed, the episode since, the step in it (from 1).
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
    """What an env writes to."""

    def write(self, seed: int, episode: int, step: int, action: int) -> None:
        """Enters one action."""

    def close(self) -> None:
        """Ends."""


class Journal:
    """A process's own file in a folder; several writers in it may share the file."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        os.makedirs(folder, exist_ok=True)
        self._pid = os.getpid()
        self._fd = os.open(
            os.path.join(folder, f"{self._pid}.journal"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )

    def write(self, seed: int, episode: int, step: int, action: int) -> None:
        """Enters one action; raises OSError if there is no room for it."""
        record = _PACK(seed, episode, step, action, self._pid)
        if os.write(self._fd, record) != RECORD.itemsize:
            raise OSError("expected room for a record of the journal; the disk is full")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_journal(folder: str | os.PathLike[str]) -> Array:
    """Returns all that was written, `RECORD` `[n]`, each process's in its order.

    Raises:
      ValueError: A record is not whole.
    """
    records = [np.zeros(0, RECORD)]
    for path in sorted(Path(folder).glob("*.journal")):
        data = path.read_bytes()
        if len(data) % RECORD.itemsize:
            raise ValueError(
                f"{path}: expected records of {RECORD.itemsize} bytes; got "
                f"{len(data)} bytes; the last write was cut short"
            )
        records.append(np.frombuffer(data, RECORD))
    return np.concatenate(records)
