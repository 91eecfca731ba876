"""Starts worker processes, by way of a template process that forks them.

The template has imported gymnasium and the user's env modules once, so a worker
starts in milliseconds. Nothing here waits for the template, except `close`. When the
owner of a launcher dies, its template and all its workers die with it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from envserve import codec
from envserve.errors import WorkerError
from envserve.worker.channel import FrameReader, Kind, pack_frame
from envserve.worker.template import kill_group

__all__ = ["Exit", "Forked", "Launcher", "one_line"]

_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from envserve.worker.template import main; main(int(sys.argv[1]))"
)
#: One env needs one thread: more would fight over the cores with the other workers.
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
#: How Python's fault handler begins, and its stack.
_FATAL: Final = "Fatal Python error: "
_STACK: Final = "Stack (most recent call first):"
_EXCERPT_LINES: Final = 10
_EXCERPT_WIDTH: Final = 200
#: How long the template may stay silent while a fork is due; it may be importing.
_FORK_SECONDS: Final = 120.0
#: The socket holds some hundreds besides.
_MAX_UNSENT: Final = 1024
#: More than the longest report, which ends with what a worker wrote to stderr.
_MAX_READ_BYTES: Final = 1 << 18
#: The template reads too slowly, as opposed to: it is gone.
_FULL: Final = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


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


def one_line(text: str) -> str:
    """Returns a text with all that is no printable character escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text.rstrip()
    )


@dataclass(slots=True, eq=False)
class Forked:
    """A worker process, as far as its launcher has heard of it.

    Attributes:
      number: Of the request to fork it.
      pid: Its process id, once it is forked.
      exit: How it has ended, once that is known.
    """

    number: int
    pid: int | None = None
    exit: Exit | None = None


class Launcher:
    """Starts worker processes and hears of their end.

    One launcher may serve several pools of one process. All methods are called from
    one thread at a time. A call that is interrupted midway costs the template, and
    with it its workers.
    """

    def __init__(
        self,
        import_modules: Iterable[str] = (),
        preload: Iterable[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the template process; it imports while the caller goes on.

        Args:
          import_modules: Modules that workers shall have imported.
          preload: Names of envs whose modules are imported too, so that their workers
            start faster. Every fork waits for it. A worker of another env imports
            that env's module itself.
          clock: Monotonic seconds.
        """
        self._import_modules = list(import_modules)
        self._preload = list(preload)
        self._clock = clock
        self._pending: dict[int, Forked] = {}  # by number
        self._running: dict[int, Forked] = {}  # by process id
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._num_sent = 0  # bytes of the first message of the outbox
        self._heard_at = 0.0  # or since when a fork is due, if that is later
        self._num_forks = 0
        self._is_midway = self._is_closed = False
        self._start_template()

    def _start_template(self) -> None:
        self._socket, theirs = _socket_pair()
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._lost = ""
        self._has_imported = False
        with theirs:
            # Sent before there is anybody who could have ended already.
            self._send({"import": self._import_modules, "preload": self._preload})
            path = json.dumps([os.path.abspath(entry) for entry in sys.path])
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**_ENVIRONMENT, **os.environ},
                    start_new_session=True,  # Ctrl-C is the owner's to handle
                )
            except OSError as error:
                self._socket.close()
                self._lost = f"cannot run: {error}"
                raise WorkerError(f"{sys.executable} {self._lost}") from None

    def launch(self) -> tuple[Forked, socket.socket]:
        """Asks for a worker process; `poll` fills in what becomes of it.

        Returns:
          The process, and this side of its socket, by whose closing it ends.

        Raises:
          WorkerError: The template process, which is started anew if need be,
            cannot run; or too many forks wait for it; or there are too few descriptors.
        """
        if self._is_closed:
            raise WorkerError(f"expected a launcher that is open; got {self!r}")
        self.poll()
        if self._lost:
            self._socket.close()
            self._start_template()
        if len(self._outbox) >= _MAX_UNSENT:
            raise WorkerError(
                f"expected less than {_MAX_UNSENT} messages that wait for the template "
                f"process; got more from {self!r}; start fewer workers at once"
            )
        ours, theirs = _socket_pair()
        if not self._pending:
            self._heard_at = self._clock()
        self._num_forks += 1
        forked = self._pending[self._num_forks] = Forked(self._num_forks)
        self._send({"fork": forked.number}, theirs)
        return forked, ours

    @property
    def has_imported(self) -> bool:
        """Whether the template has imported all modules, so that forks are quick."""
        self.poll()
        return self._has_imported

    def kill(self, forked: Forked, *, has_stack: bool = False) -> None:
        """Kills a worker and the processes that its envs have started.

        The template does it, since only it knows whether the process id is still
        that worker's. A worker that has ended already is left alone.

        Args:
          forked: The worker.
          has_stack: Give it a moment to write its Python stack to stderr first.
        """
        self.poll()  # which ends a template that an interrupt has left midway
        self._send({"kill": forked.number, "stack": has_stack})

    def poll(self) -> None:
        """Reads what the template reports, without waiting.

        Sends what is left to, too. A template that is silent for two minutes while a
        fork is due is killed; all its workers are then reported as ended.
        """
        if self._lost:
            return
        if self._is_midway:
            self._end_template("was interrupted, and ")
            return
        self._is_midway = True
        self._flush()
        while not self._lost and self._read():
            pass
        self._is_midway = False

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `poll` has something to read."""
        if not self._lost:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            waiting.poll(math.ceil(1000 * timeout_seconds))

    def _read(self) -> bool:
        """Handles reports that have come; tells whether there may be more."""
        try:
            data = self._socket.recv(_MAX_READ_BYTES)
        except BlockingIOError:
            if self._pending and self._clock() - self._heard_at > _FORK_SECONDS:
                modules = ", ".join([*self._import_modules, *self._preload])
                self._end_template(
                    f"took longer than {_FORK_SECONDS:g} s to fork a worker; is an "
                    f"import stuck ({modules or 'gymnasium'})? It "
                )
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._end_template("", is_gone=True)
            return False
        self._heard_at = self._clock()
        for frame in self._reader.feed(data):
            self._on_message(codec.decode(frame.payload))
        return True

    def close(self) -> None:
        """Ends the template process; workers that still run are killed with it."""
        self._socket.close()
        self._is_closed = True
        if not self._lost:
            self._end_template("", is_gone=True)

    def _send(
        self, message: dict[str, Any], theirs: socket.socket | None = None
    ) -> None:
        """Queues a message, and the socket that goes with it; repeats are dropped."""
        self._is_midway = True
        data = pack_frame(Kind.FORK, payload=codec.encode(message))
        if all(data != queued for queued, _ in self._outbox):
            self._outbox.append((data, theirs))
        self._flush()
        self._is_midway = False

    def _flush(self) -> None:
        while self._outbox:
            data, theirs = self._outbox[0]
            fds = [] if theirs is None else [theirs.fileno()]
            try:
                sent = socket.send_fds(self._socket, [data[self._num_sent :]], fds)
            except OSError as error:
                if error.errno not in _FULL:
                    # It took its workers with it, as `poll` will report.
                    self._clear_outbox()
                return
            self._num_sent += sent
            if theirs is not None:
                theirs.close()
            self._outbox[0] = data, None
            if self._num_sent == len(data):
                self._outbox.popleft()
                self._num_sent = 0

    def _clear_outbox(self) -> None:
        for _, theirs in self._outbox:
            if theirs is not None:
                theirs.close()
        self._outbox.clear()
        self._num_sent = 0

    def _on_message(self, message: dict[str, Any]) -> None:
        if "imported" in message:
            self._has_imported = message["imported"]
        elif "exit" in message and message["pid"] in self._running:
            tail = message["stderr"].decode(errors="backslashreplace")
            end = Exit(message["pid"], message["exit"], stderr_tail=tail)
            self._running[message["pid"]].exit = end
            del self._running[message["pid"]]
        elif message.get("fork") in self._pending:
            forked = self._pending[message["fork"]]
            if "error" in message:
                forked.exit = Exit(0, 1, message["error"])
            else:
                self._running[message["pid"]] = forked
                forked.pid = message["pid"]
            del self._pending[message["fork"]]  # last: here an interrupt finds it

    def _end_template(self, why: str, *, is_gone: bool = False) -> None:
        """Has the template be no more; its workers die with it.

        Args:
          why: What its end is to be told with.
          is_gone: Whether it may have a moment to end by itself.
        """
        if not is_gone:
            self._process.kill()
        end = "cannot be killed"
        for _ in range(2):
            try:
                exit_code = self._process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:  # busy with an import
                self._process.kill()
            else:
                end = str(Exit(self._process.pid, exit_code))
                break
        self._clear_outbox()
        for pid, forked in self._running.items():
            # On Linux the kernel has done it, if the template is dead indeed.
            if sys.platform != "linux" or self._process.returncode is None:
                kill_group(pid)
            forked.exit = Exit(pid, -signal.SIGKILL)
        for forked in self._pending.values():
            if forked.exit is None:
                forked.exit = Exit(0, 1, f"the template process {why}{end}")
        self._running, self._pending = {}, {}
        self._lost = why + end
        self._is_midway = False

    def __repr__(self) -> str:
        """Returns the process id and the number of workers."""
        state = self._lost or f"{len(self._running)} workers"
        return f"<Launcher pid {self._process.pid}, {state}>"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerError(f"no socket for a worker: {error}") from None
