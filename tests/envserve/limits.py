"""Limits of other processes."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Sets a limit of another process, for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def descriptors_of(pid: int) -> set[int]:
    """What it has open; skips the test where that is hidden, as a server's is."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    except PermissionError:
        pytest.skip("only root sees the descriptors of a server")


def room_for_descriptors(pid: int, count: int) -> int:
    """The limit under which a process can open so many descriptors more."""
    taken = descriptors_of(pid)
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, count, None))
