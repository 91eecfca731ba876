"""A test ends with the processes and non-daemon threads that it began with.

What it leaves behind fails it and is killed. On Linux that covers orphans and
grandchildren; elsewhere the children of `multiprocessing`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

#: What a test closed may need this long to be gone, on a machine that is busy: the
#: kernel ends orphans on its own, and they end theirs.
GRACE_SECONDS = 20.0
#: Environment variable by which orphans are found: every process started inherits it.
MARK_NAME = "TEST_SESSION_OF_ENVSERVE"
MARK_VALUE = f"{os.getpid()}-{secrets.token_hex(4)}"
#: Kept for the life of the interpreter by the standard library itself.
STANDARD_LIBRARY_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forks")


class Process(NamedTuple):
    pid: int
    start_tick: int  # tells a process from a later one that has the same pid
    parent: int
    command: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_tick


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves child processes or non-daemon threads behind."""
    processes_before = running_processes()
    threads_before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    threads = [
        thread
        for thread in set(threading.enumerate()) - threads_before
        if not thread.daemon and is_alive_at(thread, deadline)
    ]
    processes = left_processes(processes_before, deadline)
    if threads or processes:
        pytest.fail(
            "Expected the test to end all that it started, but it left behind\n"
            + "".join(f"  thread {thread.name}\n" for thread in threads)
            + "".join(f"  process {p.pid}: {p.command}\n" for p in processes)
            + "Close what started them, in the test or in the code under test.",
            pytrace=False,
        )


def is_alive_at(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return thread.is_alive()


def left_processes(before: dict[int, Process], deadline: float) -> list[Process]:
    """Processes started since `before` that outlive `deadline`; they are killed."""
    if sys.platform != "linux":
        return left_multiprocessing_children(before, deadline)
    left = []
    known = {process.identity for process in before.values()}
    now = running_processes()
    for process in now.values():
        # A longer-lived fixture may replace its own workers while a test runs.
        if any(ancestor.identity in known for ancestor in lineage(process, now)):
            continue
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], remaining)[0]:
                left.append(process)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return left


def left_multiprocessing_children(
    before: dict[int, Process], deadline: float
) -> list[Process]:
    left = []
    for child in multiprocessing.active_children():
        if child.pid is None or child.pid in before:
            continue
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            left.append(Process(child.pid, 0, os.getpid(), child.name))
            child.kill()
    return left


def running_processes() -> dict[int, Process]:
    """Every running process that this one started, directly or not, by its pid."""
    if sys.platform != "linux":
        return {
            child.pid: Process(child.pid, 0, os.getpid(), child.name)
            for child in multiprocessing.active_children()
            if child.pid is not None
        }
    return processes_among(frozenset(filter(str.isdigit, os.listdir("/proc"))))


@functools.lru_cache(maxsize=1)
def processes_among(pids: frozenset[str]) -> dict[int, Process]:
    """The same. Few tests change what runs, and to read all of it outlasts most."""
    mark = f"{MARK_NAME}={MARK_VALUE}".encode()
    began = int(stat_fields("self")[19])
    every: dict[int, Process] = {}
    marked: set[int] = set()
    for name in pids:
        try:
            fields = stat_fields(name)
            if fields[0] == b"Z" or int(fields[19]) < began:
                continue  # what is older than the tests is not theirs
            command = read(f"/proc/{name}/cmdline").replace(b"\0", b" ").decode()
            pid = int(name)
            every[pid] = Process(pid, int(fields[19]), int(fields[1]), command.strip())
            if mark in read(f"/proc/{name}/environ").split(b"\0"):
                marked.add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to another user
    return {
        pid: process
        for pid, process in every.items()
        if pid != os.getpid()
        and not is_standard_library_helper(process)
        and (pid in marked or lineage(process, every)[-1].parent == os.getpid())
    }


def stat_fields(pid: str) -> list[bytes]:
    # The command name, in parentheses, may itself hold spaces and parentheses.
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def lineage(process: Process, processes: dict[int, Process]) -> list[Process]:
    """The process and its ancestors among `processes`, up to this process."""
    line = [process]
    while line[-1].parent in processes and line[-1].parent != os.getpid():
        line.append(processes[line[-1].parent])
    return line


def is_standard_library_helper(process: Process) -> bool:
    # The forkserver's children have its command line too, but another parent.
    return process.parent == os.getpid() and any(
        helper in process.command for helper in STANDARD_LIBRARY_HELPERS
    )
