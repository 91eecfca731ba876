"""The states of a worker, its events, and the description of its exit.

A worker outlives its processes: it is a set of blocks whose envs are hosted by at most
one process at a time. Its states are

    BACKOFF -> STARTING -> SERVING -> BACKOFF -> ...

In BACKOFF, the worker waits for the next start. In STARTING, it waits for the READY
message of the new process. In SERVING, the process executes operations until it ends. A
process that misbehaves (hangs, or sends invalid messages) is KILLED. Its messages are
then ignored, and the worker waits for its exit: until the exit is known, the process
may still write to its rows, so no successor may be started. In CLOSING, the process was
asked to exit. ENDED is final: the worker was closed, its process could not be killed,
or the worker has failed too often.

`TRANSITIONS` lists the allowed transitions. An interrupted call may leave a worker in
any state; `SupervisedWorker.kill_and_wait` then ends it, and a new worker replaces it.
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

#: Text with which a crash report of `faulthandler` begins, and first line of a stack.
_FATAL: Final = "Fatal Python error: "
_STACK: Final = "Stack (most recent call first):"
#: The first frame that begins with this text, and all frames below that frame, belong
#: to envserve, not to the env.
_OUR_FRAME: Final = f'  File "{Path(worker.__file__).parent}{os.sep}'
#: Signals that other processes or the kernel send; not signals of a crash.
_OUTSIDE_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXCERPT_LINES: Final = 10
_EXCERPT_WIDTH: Final = 200


class WorkerState(enum.Enum):
    """The states of a worker."""

    BACKOFF = enum.auto()  # no process; waits for the next start
    STARTING = enum.auto()  # the process builds its envs
    SERVING = enum.auto()  # the process executes operations
    KILLED = enum.auto()  # the process was killed; waits for its exit
    CLOSING = enum.auto()  # the process was asked to exit
    ENDED = enum.auto()  # no process, and no further start


_AFTER_ANY_PROCESS: Final = {WorkerState.BACKOFF, WorkerState.ENDED}
_AFTER_SERVING: Final = {WorkerState.KILLED, WorkerState.CLOSING, *_AFTER_ANY_PROCESS}

#: Allowed next states. Only `SupervisedWorker` changes states.
TRANSITIONS: Final[dict[WorkerState, set[WorkerState]]] = {
    WorkerState.BACKOFF: {WorkerState.STARTING, WorkerState.ENDED},
    WorkerState.STARTING: {WorkerState.SERVING, *_AFTER_SERVING},
    WorkerState.SERVING: _AFTER_SERVING,
    WorkerState.KILLED: _AFTER_ANY_PROCESS,
    WorkerState.CLOSING: {WorkerState.KILLED, WorkerState.ENDED},
    WorkerState.ENDED: set(),
}


class Ready(NamedTuple):
    """All envs of the worker are built."""

    spec: EnvSpec


class Lost(NamedTuple):
    """The process ended unexpectedly; it is restarted unless the worker is ENDED."""

    status: Status
    text: str


#: Events of a worker; a `ChannelMessage` is the reply to an operation.
Event = ChannelMessage | Ready | Lost


@dataclass(frozen=True)
class Exit:
    """The exit of a worker process.

    Attributes:
      pid: Process id; 0 if the process was not started.
      exit_code: Exit code as in `os.waitstatus_to_exitcode`; negative for a signal.
      error: Reason for a failed start of the process; empty if it was started.
      stderr_tail: The end of the process's stderr output.
      lacks_resources: Whether the host had too few resources to start the process.
    """

    pid: int
    exit_code: int
    error: str = ""
    stderr_tail: str = ""
    lacks_resources: bool = False

    @property
    def ended_by_itself(self) -> bool:
        """Whether the process was started, and then exited or crashed by itself."""
        return not self.error and -self.exit_code not in _OUTSIDE_SIGNALS

    @property
    def stderr_summary(self) -> str:
        """The last line of stderr; for a stack, the error and the first frame."""
        first, _, rest = self.stderr_excerpt.partition("\n")
        if first.startswith((_STACK, _FATAL)):
            frame = next((f for f in rest.splitlines() if not f.startswith(_STACK)), "")
            return f"{first.removesuffix(':')}: {frame.strip()}"
        return self._lines[-1] if self._lines else ""

    @property
    def _lines(self) -> list[str]:
        lines = map(one_line, self.stderr_tail.splitlines())
        return [line for line in lines if line.strip()]

    @property
    def stderr_excerpt(self) -> str:
        """The lines of `stderr_tail` that may explain the exit; may be empty.

        If stderr ends with a stack, these are the frames closest to the crash or hang.
        Otherwise, the excerpt is empty for exit code 0 and SIGKILL, because the output
        is then probably unrelated to the exit.
        """
        lines = self._lines
        stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK)]
        if stacks:
            start = stacks[-1]
            if start and lines[start - 1].startswith(_FATAL):
                start -= 1
            lines = lines[start : start + _EXCERPT_LINES]
            library = [i for i, line in enumerate(lines) if line.startswith(_OUR_FRAME)]
            lines = lines[: max(3, *library[:1])] if library else lines
        elif self.exit_code in (0, -signal.SIGKILL):
            return ""
        return "\n".join(line[:_EXCERPT_WIDTH] for line in lines[-_EXCERPT_LINES:])

    def describe_while(self, work: str) -> str:
        """Return a description such as "exited with code 1 while it imported foo"."""
        hint = (
            "; modules and constructors must not end their process or close its "
            "descriptors"
        )
        return f"{self} while it {work}{hint if self.exit_code >= 0 else ''}"

    def __str__(self) -> str:
        """Return a description such as "was killed by SIGKILL"."""
        if self.error:
            return f"could not be started: {self.error}"
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"
