"""Starts worker processes, by way of a template process that forks them.

The template has imported gymnasium and the user's env modules once, so a worker
starts in milliseconds. Nothing here waits for the template, except `close`. When the
owner of a launcher dies, its template and all its workers die with it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from envserve.errors import WorkerError
from envserve.worker.template import kill_group, pack_message, take_messages

__all__ = ["Exit", "Launcher", "one_line"]

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


class Launcher:
    """Starts worker processes and hears of their end.

    One launcher may serve several pools of one process. All methods are called from
    one thread at a time.
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
        self._pending: dict[
            int, tuple[Callable[[int], None], Callable[[Exit], None]]
        ] = {}
        self._watchers: dict[int, Callable[[Exit], None]] = {}
        self._outbox: dict[bytes, socket.socket | None] = {}
        self._num_sent = 0  # bytes of the first message of the outbox
        self._heard_at = 0.0  # or since when a fork is due, if that is later
        self._next_id = 0
        self._is_closed = False
        self._start_template()

    def _start_template(self) -> None:
        self._socket, theirs = _socket_pair()
        self._socket.setblocking(False)
        self._lost = self._stuck = ""
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

    def launch(
        self,
        on_start: Callable[[int], None],
        on_exit: Callable[[Exit], None],
    ) -> tuple[int, socket.socket]:
        """Forks a worker; returns a handle for `kill`, and this side of its socket.

        Args:
          on_start: Called by `poll` with the process id.
          on_exit: Called by `poll` once, when the process has ended.

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
        self._next_id += 1
        self._pending[self._next_id] = (on_start, on_exit)
        self._send({"fork": self._next_id}, theirs)
        return self._next_id, ours

    @property
    def has_imported(self) -> bool:
        """Whether the template has imported all modules, so that forks are quick."""
        self.poll()
        return self._has_imported

    def kill(self, handle: int, *, has_stack: bool = False) -> None:
        """Kills a worker and the processes that its envs have started.

        The template does it, since only it knows whether the process id is still
        that worker's. A worker that has ended already is left alone.

        Args:
          handle: What `launch` has returned.
          has_stack: Give it a moment to write its Python stack to stderr first.
        """
        self._send({"kill": handle, "stack": has_stack})

    def poll(self) -> None:
        """Reads what the template reports, without waiting, and calls back.

        Sends what is left to, too. A template that is silent for two minutes while a
        fork is due is killed; all its workers are then reported as ended.
        """
        if self._lost:
            self._on_template_lost()  # an interrupt may have cut it short
            return
        self._flush()
        while self._read():
            pass

    def _read(self) -> bool:
        """Handles reports that have come; tells whether there may be more.

        What an interrupt cuts short is done again: nothing is taken from the socket
        before it is handled, and a report that was handled already changes nothing.
        """
        try:
            data = self._socket.recv(_MAX_READ_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            self._check_stuck()
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._on_template_lost()
            return False
        self._heard_at = self._clock()
        rest = bytearray(data)
        for message in take_messages(rest):
            self._on_message(message)
        num_handled = len(data) - len(rest)
        if num_handled:
            self._socket.recv(num_handled)
        return num_handled > 0

    def close(self) -> None:
        """Ends the template process; workers that still run are killed with it."""
        self._socket.close()
        self._is_closed = True
        self._on_template_lost()

    def _check_stuck(self) -> None:
        if self._pending and self._clock() - self._heard_at > _FORK_SECONDS:
            modules = ", ".join([*self._import_modules, *self._preload])
            self._stuck = (
                f"took longer than {_FORK_SECONDS:g} s to fork a worker; is an import "
                f"stuck ({modules or 'gymnasium'})? It "
            )
            self._process.kill()
            self._on_template_lost()

    def _send(
        self, message: dict[str, Any], theirs: socket.socket | None = None
    ) -> None:
        """Queues a message, and the socket that goes with it; repeats are dropped."""
        self._outbox.setdefault(pack_message(message), theirs)
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            data, theirs = next(iter(self._outbox.items()))
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
                self._outbox[data] = None
            if self._num_sent == len(data):
                del self._outbox[data]
                self._num_sent = 0

    def _clear_outbox(self) -> None:
        for theirs in self._outbox.values():
            if theirs is not None:
                theirs.close()
        self._outbox.clear()
        self._num_sent = 0

    def _on_message(self, message: dict[str, Any]) -> None:
        if "imported" in message:
            self._has_imported = message["imported"]
            return
        if "exit" in message:
            pid = message["pid"]
            if pid in self._watchers:
                tail = message["stderr"].decode(errors="backslashreplace")
                self._watchers[pid](Exit(pid, message["exit"], stderr_tail=tail))
                del self._watchers[pid]
        elif message["fork"] in self._pending:
            on_start, on_exit = self._pending[message["fork"]]
            if "error" in message:
                on_exit(Exit(0, 1, message["error"]))
            else:
                self._watchers[message["pid"]] = on_exit
                on_start(message["pid"])
            del self._pending[message["fork"]]

    def _on_template_lost(self) -> None:
        """Workers die with the template, so every watcher hears of an end."""
        if not self._lost:
            self._lost = self._stuck + self._end_template()
        self._clear_outbox()
        while self._watchers:
            pid, on_exit = next(iter(self._watchers.items()))
            # On Linux the kernel has done it, if the template is dead indeed.
            if sys.platform != "linux" or self._process.returncode is None:
                kill_group(pid)
            on_exit(Exit(pid, -signal.SIGKILL))
            del self._watchers[pid]
        while self._pending:
            number, (_, on_exit) = next(iter(self._pending.items()))
            on_exit(Exit(0, 1, f"the template process {self._lost}"))
            del self._pending[number]

    def _end_template(self) -> str:
        """Says how the template has ended, after a kill if it has not yet."""
        for _ in range(2):
            try:
                return str(Exit(self._process.pid, self._process.wait(timeout=1.0)))
            except subprocess.TimeoutExpired:  # busy with an import
                self._process.kill()
        return "cannot be killed"

    def __repr__(self) -> str:
        """Returns the process id and the number of workers."""
        state = self._lost or f"{len(self._watchers)} workers"
        return f"<Launcher pid {self._process.pid}, {state}>"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerError(f"no socket for a worker: {error}") from None
