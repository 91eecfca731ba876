"""What processes, and all that they have started, take of a machine."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest import mock

import psutil


@contextlib.contextmanager
def own_keys() -> Iterator[None]:
    """Has servers and clients use keys of a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        home = {"ENVSERVE_HOME": os.path.join(folder, "home")}
        with mock.patch.dict(os.environ, home):
            yield


class Vitals(NamedTuple):
    """What a process takes.

    Attributes:
      state: As psutil names it; a zombie has ended, and nobody has asked for its exit
        status.
      resident_bytes: Memory, shared pages included.
    """

    pid: int
    state: str
    resident_bytes: int
    num_threads: int
    num_files: int


def with_descendants(pid: int) -> list[int]:
    """Returns a process and the processes that it has started, directly or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(pid).children(recursive=True)
        return [pid, *(process.pid for process in started)]
    return [pid]


def vitals_of(pid: int) -> Vitals | None:
    """Returns what a process takes; None for one that has ended."""
    try:
        process = psutil.Process(pid)
        state, num_files = process.status(), 0
        with contextlib.suppress(psutil.AccessDenied, psutil.ZombieProcess):
            num_files = process.num_fds()
        memory, num_threads = process.memory_info().rss, process.num_threads()
    except psutil.NoSuchProcess:
        return None
    return Vitals(pid, state, memory, num_threads, num_files)


def is_running(pid: int) -> bool:
    """Tells whether a process is there and is no zombie."""
    vitals = vitals_of(pid)
    return vitals is not None and vitals.state not in (
        psutil.STATUS_ZOMBIE,
        psutil.STATUS_DEAD,
    )


def kill_all(pids: Iterable[int]) -> None:
    """Kills processes; those that have ended are left alone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def proportional_set_bytes(pids: Iterable[int]) -> int:
    """Returns the sum of their proportional set sizes; on Linux only.

    There, a page that several processes share counts for each by its share.
    """
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
