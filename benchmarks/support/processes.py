"""Measure the resources of processes and their descendants."""

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
def temporary_keys() -> Iterator[None]:
    """Use a temporary key folder for servers and clients inside the `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        home = {"ENVSERVE_HOME": os.path.join(folder, "home")}
        with mock.patch.dict(os.environ, home):
            yield


class ProcessUsage(NamedTuple):
    """State and resources of a process.

    Attributes:
      state: State, as named by psutil. A zombie has exited, but its parent has not read
      its exit status.
      resident_bytes: Resident memory, including shared pages.
      num_files: Number of open file descriptors; 0 if it cannot be read.
    """

    pid: int
    state: str
    resident_bytes: int
    num_threads: int
    num_files: int


def with_descendants(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
        return [pid, *(process.pid for process in descendants)]
    return [pid]


def usage_of(pid: int) -> ProcessUsage | None:
    """Return the resources of a process, or None if it has exited."""
    try:
        process = psutil.Process(pid)
        state, num_files = process.status(), 0
        with contextlib.suppress(psutil.AccessDenied, psutil.ZombieProcess):
            num_files = process.num_fds()
        memory, num_threads = process.memory_info().rss, process.num_threads()
    except psutil.NoSuchProcess:
        return None
    return ProcessUsage(pid, state, memory, num_threads, num_files)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    usage = usage_of(pid)
    return usage is not None and usage.state not in (
        psutil.STATUS_ZOMBIE,
        psutil.STATUS_DEAD,
    )


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; ignore processes that have already exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def proportional_set_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the proportional set sizes of processes (Linux only).

    A page that N processes share counts as 1/N for each of them.
    """
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
