"""Limits of other processes."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Sets a limit of another process, for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def room_for_descriptors(pid: int, count: int) -> int:
    """The limit under which a process can open so many descriptors more."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, count, None))
