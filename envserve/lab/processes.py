"""What processes, and all that they have started, take of a Linux machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "Vitals",
    "is_running",
    "kill_all",
    "proportional_set_bytes",
    "vitals_of",
    "with_descendants",
]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PROC: Final = Path("/proc")


class Vitals(NamedTuple):
    """What a process takes.

    Attributes:
      pid: Its process id.
      state: As in /proc; "Z" has ended, and nobody has asked for its exit status.
      resident_bytes: Memory, shared pages included.
      num_threads: Threads.
      num_files: Open descriptors.
    """

    pid: int
    state: str
    resident_bytes: int
    num_threads: int
    num_files: int


def with_descendants(pid: int) -> list[int]:
    """Returns a process and the processes that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def vitals_of(pid: int) -> Vitals | None:
    """Returns what a process takes; None for one that has ended."""
    fields = _stat(pid)
    if fields is None:
        return None
    num_files = 0
    with contextlib.suppress(OSError):  # it has ended since, or is a zombie
        num_files = len(os.listdir(_PROC / str(pid) / "fd"))
    return Vitals(
        pid, fields[0], int(fields[21]) * _PAGE_BYTES, int(fields[17]), num_files
    )


def is_running(pid: int) -> bool:
    """Tells whether a process is there and is no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def kill_all(pids: Iterable[int]) -> None:
    """Kills processes; those that have ended are left alone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def proportional_set_bytes(pids: list[int]) -> int:
    """Returns the sum of their proportional set sizes.

    There, a page that several processes share counts for each by its share.
    """
    return sum(_proportional_set_bytes(pid) for pid in pids)


def _proportional_set_bytes(pid: int) -> int:
    lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return int(kibibytes) << 10


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of a process's stat from its state on, if it is there."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses.
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has just ended
