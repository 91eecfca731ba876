"""Where a worker is in its life, and what a pool hears of it.

A worker is one place for envs, over all its processes. It builds envs, then serves
until its process ends; then it waits for the next start. A process that misbehaves is
killed: from then on nothing that it says is believed, and its successor starts once
its exit is known, since until then it may write to its rows.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from envserve.slab import Status
from envserve.spec import EnvSpec
from envserve.worker.channel import Frame

__all__ = ["MOVES", "Event", "Lost", "Ready", "WorkerState"]


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    BACKOFF = enum.auto()  # has no process; waits for the next start
    STARTING = enum.auto()  # builds envs
    SERVING = enum.auto()  # answers
    KILLED = enum.auto()  # is not believed any more; its exit is waited for
    CLOSING = enum.auto()  # was asked to end
    ENDED = enum.auto()  # has no process, and gets none


_AFTER_ANY_PROCESS: Final = {WorkerState.BACKOFF, WorkerState.ENDED}

#: What each state may become; only `SupervisedWorker` writes one.
MOVES: Final[dict[WorkerState, set[WorkerState]]] = {
    WorkerState.BACKOFF: {WorkerState.STARTING, WorkerState.ENDED},
    WorkerState.STARTING: {
        *(WorkerState.SERVING, WorkerState.KILLED, WorkerState.CLOSING),
        *_AFTER_ANY_PROCESS,
    },
    WorkerState.SERVING: {
        *(WorkerState.KILLED, WorkerState.CLOSING),
        *_AFTER_ANY_PROCESS,
    },
    WorkerState.KILLED: _AFTER_ANY_PROCESS,
    WorkerState.CLOSING: {WorkerState.KILLED, WorkerState.ENDED},
    WorkerState.ENDED: set(),
}


class Ready(NamedTuple):
    """All envs of the worker are built."""

    spec: EnvSpec


class Lost(NamedTuple):
    """The process has ended unasked; another will follow, or the state is ENDED."""

    status: Status
    text: str


#: What happens to a worker; a frame is the answer to an operation.
Event = Frame | Ready | Lost
