"""Processes that end with who has started them, and those that others adopt.

`OrphanReaper` reaps what processes of envs have left to this one, which adopts it: see
`template`. Its own children are an env's to wait for: their exit codes are known once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["OrphanReaper", "children", "until_parent_ends"]

#: What nobody has waited for within this time was adopted, most likely.
_PATIENCE_SECONDS: Final = 60.0
#: How often it is looked, in operations.
_EVERY: Final = 256


class OrphanReaper:
    """Knows since when which children have ended."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._num_calls = 0

    def reap(self) -> None:
        """Reaps those that have ended and were adopted, now and then; never waits."""
        self._num_calls += 1
        if self._num_calls % _EVERY or sys.platform != "linux" or not _has_ended():
            return
        now, ours = time.monotonic(), os.getsid(0)
        ended = {pid: session for pid, state, session in children() if state == b"Z"}
        self._seen = {pid: self._seen.get(pid, now) for pid in ended}
        for pid, session in ended.items():
            is_adopted = session not in (ours, pid)
            if is_adopted or now > self._seen[pid] + _PATIENCE_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _has_ended() -> bool:
    """Tells whether a child has, which stays as it is."""
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_ALL, 0, flags) is not None
    except ChildProcessError:
        return False


def until_parent_ends(module: str) -> str:
    """Returns code that runs a `main`; on Linux it gets SIGTERM if its parent ends."""
    # PR_SET_PDEATHSIG, which is about the thread that starts the process; SIGTERM
    return f"""import ctypes; getattr(ctypes.CDLL(None), "prctl", max)(1, 15)
from {module} import main; main()"""


def children(of: int | None = None) -> list[tuple[int, bytes, int]]:
    """Returns a process's children, adopted ones too, by default this one's; on Linux.

    Of each its process id, state and session.
    """
    if sys.platform != "linux":
        return []
    found, ours = [], of or os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            # Its name, which comes before, may hold anything.
            stat = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2]
            state, parent, _, session, *_ = stat.split()
            if int(parent) == ours:
                found.append((int(name), state, int(session)))
    return found
