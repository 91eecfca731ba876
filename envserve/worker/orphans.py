"""List child processes, and reap adopted ones.

A worker adopts the processes that its envs leave behind (see `template`), and must reap
them. It must not reap an env's direct children, because an exit code can be read only
once, and the env may be waiting for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from envserve.worker import unpatched

#: A zombie that no env has waited for within this time was probably adopted.
_ADOPTED_AFTER_SECONDS: Final = 60.0
#: Number of calls to `reap` per search for zombies.
_REAP_INTERVAL: Final = 256


class OrphanReaper:
    """Reaps adopted processes that have exited."""

    def __init__(self) -> None:
        self._zombies_since: dict[int, float] = {}
        self._num_calls = 0

    def reap(self) -> None:
        """Reap adopted processes in every 256th call, without blocking."""
        self._num_calls += 1
        if (
            self._num_calls % _REAP_INTERVAL
            or sys.platform != "linux"
            or not _has_zombie_child()
        ):
            return
        now, own_session = unpatched.monotonic(), os.getsid(0)
        ended = {
            pid: session for pid, state, session in child_processes() if state == b"Z"
        }
        self._zombies_since = {pid: self._zombies_since.get(pid, now) for pid in ended}
        for pid, session in ended.items():
            is_adopted = session not in (own_session, pid)
            if is_adopted or now > self._zombies_since[pid] + _ADOPTED_AFTER_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    unpatched.waitpid(pid, os.WNOHANG)


def _has_zombie_child() -> bool:
    """Return whether a child has exited, without reaping it."""
    if unpatched.waitid is None:
        return False
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return unpatched.waitid(os.P_ALL, 0, flags) is not None
    except ChildProcessError:
        return False


def child_processes(pid: int | None = None) -> list[tuple[int, bytes, int]]:
    """Return the process id, state and session of each child, including adopted ones.

    The parent is this process by default. Without /proc, as on macOS, return an empty
    list.
    """
    if not os.path.isdir("/proc"):
        return []
    children, parent_pid = [], pid or os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has exited
            # The name of the process, in parentheses, may contain anything.
            stat = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2]
            state, parent, _, session, *_ = stat.split()
            if int(parent) == parent_pid:
                children.append((int(name), state, int(session)))
    return children
