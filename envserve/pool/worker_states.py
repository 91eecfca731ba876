"""Where a worker is in its life, how its process ends, and what a pool hears of it.

A worker is one place for envs, over all its processes. It builds envs, then serves
until its process ends; then it waits for the next start. A process that misbehaves is
killed: from then on nothing that it says is believed, and its successor starts once
its exit is known, since until then it may write to its rows.
"""

from __future__ import annotations

import enum
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from envserve import worker
from envserve.slab import Status
from envserve.spaces.env_spec import EnvSpec
from envserve.text import one_line
from envserve.worker.channel import ChannelMessage

__all__ = ["MOVES", "Event", "Exit", "Lost", "Ready", "WorkerState"]

#: How Python's fault handler begins, and its stack.
_FATAL: Final = "Fatal Python error: "
_STACK: Final = "Stack (most recent call first):"
#: Below the first of these are no frames of envs.
_OUR_FRAME: Final = f'  File "{Path(worker.__file__).parent}{os.sep}'
_EXCERPT_LINES: Final = 10
_EXCERPT_WIDTH: Final = 200


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


#: What happens to a worker; a `ChannelMessage` is the answer to an operation.
Event = ChannelMessage | Ready | Lost


@dataclass(frozen=True)
class Exit:
    """The end of a worker process.

    Attributes:
      pid: Its process id.
      exit_code: As of `os.waitstatus_to_exitcode`: negative for a signal.
      error: Why the process could not be started at all; else empty.
      stderr_tail: The end of what it has written to stderr.
    """

    pid: int
    exit_code: int
    error: str = ""
    stderr_tail: str = ""

    @property
    def last_words(self) -> str:
        """The last line of `stderr_tail`; of a stack, the error and its first frame."""
        first, _, rest = self.excerpt.partition("\n")
        if first.startswith((_STACK, _FATAL)):
            frame = next((f for f in rest.splitlines() if not f.startswith(_STACK)), "")
            return f"{first.removesuffix(':')}: {frame.strip()}"
        return self._lines[-1] if self._lines else ""

    @property
    def _lines(self) -> list[str]:
        lines = map(one_line, self.stderr_tail.splitlines())
        return [line for line in lines if line.strip()]

    @property
    def excerpt(self) -> str:
        """The lines of `stderr_tail` that may tell why it ended; else empty.

        Of a stack, the frames next to the crash or hang. Else nothing of a worker that
        was killed: what it said before has another reason.
        """
        lines = self._lines
        stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
        if stacks:
            start = stacks[-1]
            if start and lines[start - 1].startswith(_FATAL):
                start -= 1
            lines = lines[start : start + _EXCERPT_LINES]
            ours = [i for i, line in enumerate(lines) if line.startswith(_OUR_FRAME)]
            lines = lines[: max(3, *ours[:1])] if ours else lines
        elif self.exit_code in (0, -signal.SIGKILL):
            return ""
        return "\n".join(line[:_EXCERPT_WIDTH] for line in lines[-_EXCERPT_LINES:])

    def __str__(self) -> str:
        """Says it in words, like "was killed by SIGKILL"."""
        if self.error:
            return f"could not be started: {self.error}"
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"
