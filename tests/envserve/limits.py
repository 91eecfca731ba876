"""Resource limits and descriptors of other processes."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def resource_limit(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Set another process's resource limit within the context."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def open_descriptors(pid: int) -> set[int]:
    """Return a process's open descriptors; skip the test if they cannot be listed."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    except PermissionError:
        pytest.skip("only root can list the descriptors of a server")


def limit_for_descriptors(pid: int, count: int) -> int:
    """Return the limit that lets a process open `count` more descriptors."""
    taken = open_descriptors(pid)
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, count, None))
