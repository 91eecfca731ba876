"""Fail tests that leave processes or non-daemon threads running.

The processes are killed. On Linux, all descendants are found, including orphans;
elsewhere, only `multiprocessing` children.
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

#: Maximum time in seconds until processes that a test has stopped are gone. Orphans
#: exit only after their parents, which can take long on a busy machine.
GRACE_SECONDS = 20.0
#: Environment variable that identifies orphans: every child process inherits it.
MARK_NAME = "TEST_SESSION_OF_ENVSERVE"
MARK_VALUE = f"{os.getpid()}-{secrets.token_hex(4)}"
#: Entries of /proc (name and inode number) of processes that this one has not started.
FOREIGN: set[tuple[str, int]] = set()
#: Processes that the standard library keeps until the interpreter exits.
STANDARD_LIBRARY_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forks")


class Process(NamedTuple):
    pid: int
    start_tick: int  # distinguishes processes when the kernel reuses a pid
    parent: int
    command: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_tick


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves child processes or non-daemon threads running."""
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
            "Expected the test to end everything that it started, but it left behind\n"
            + "".join(f"  thread {thread.name}\n" for thread in threads)
            + "".join(f"  process {p.pid}: {p.command}\n" for p in processes)
            + "Close the objects that started them, in the test or in the code.",
            pytrace=False,
        )


def is_alive_at(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return thread.is_alive()


def left_processes(before: dict[int, Process], deadline: float) -> list[Process]:
    """Kill and return processes that are not in `before` and outlive `deadline`."""
    if sys.platform != "linux":
        return left_multiprocessing_children(before, deadline)
    left = []
    known = {process.identity for process in before.values()}
    now = running_processes()
    for process in now.values():
        # Fixtures of wider scope may replace their workers while a test runs.
        if any(ancestor.identity in known for ancestor in with_ancestors(process, now)):
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
    """Return all running descendants of this process, by pid."""
    if sys.platform != "linux":
        return {
            child.pid: Process(child.pid, 0, os.getpid(), child.name)
            for child in multiprocessing.active_children()
            if child.pid is not None
        }
    with os.scandir("/proc") as folder:
        # A new process has another inode number, even if it has the pid of an old one.
        entries = {(each.name, each.inode()) for each in folder if each.name.isdigit()}
    FOREIGN.intersection_update(entries)
    return processes_among(frozenset(entries - FOREIGN))


@functools.lru_cache(maxsize=1)
def processes_among(entries: frozenset[tuple[str, int]]) -> dict[int, Process]:
    """Return the pids that belong to descendants of this process.

    The result is cached, because most tests start no processes, and reading /proc would
    take longer than most tests.
    """
    mark = f"{MARK_NAME}={MARK_VALUE}".encode()
    began = int(stat_fields("self")[19])
    every: dict[int, Process] = {}
    marked: set[int] = set()
    of_others: dict[int, tuple[str, int]] = {}
    for name, inode in entries:
        try:
            fields = stat_fields(name)
            if int(fields[19]) < began:  # the process is older than the test run
                FOREIGN.add((name, inode))
                continue
            if fields[0] == b"Z":
                continue
            command = (
                read(f"/proc/{name}/cmdline")
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
            pid = int(name)
            every[pid] = Process(pid, int(fields[19]), int(fields[1]), command.strip())
            environment = read(f"/proc/{name}/environ")
            if mark in environment.split(b"\0"):
                marked.add(pid)
            elif f"{MARK_NAME}=".encode() in environment:
                of_others[pid] = (name, inode)  # unless it is a child of this process
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process has ended, or belongs to another user
    ours = {
        pid: process
        for pid, process in every.items()
        if pid in marked or with_ancestors(process, every)[-1].parent == os.getpid()
    }
    FOREIGN.update(of_others[pid] for pid in of_others.keys() - ours.keys())
    return {
        pid: process
        for pid, process in ours.items()
        if pid != os.getpid() and not is_standard_library_helper(process)
    }


def stat_fields(pid: str) -> list[bytes]:
    # The command name, in parentheses, may contain spaces and parentheses.
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def with_ancestors(process: Process, processes: dict[int, Process]) -> list[Process]:
    """Return a process and its ancestors among `processes`, up to this process."""
    line = [process]
    while line[-1].parent in processes and line[-1].parent != os.getpid():
        line.append(processes[line[-1].parent])
    return line


def is_standard_library_helper(process: Process) -> bool:
    # Children of the forkserver have the same command line, but another parent.
    return process.parent == os.getpid() and any(
        helper in process.command for helper in STANDARD_LIBRARY_HELPERS
    )
