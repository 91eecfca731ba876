"""Starts worker processes, by way of a template process that forks them.

The template has imported gymnasium and the user's env modules once, so a worker
starts in milliseconds. Nothing here waits for the template, except `close`. When the
owner of a launcher dies, its template and all its workers die with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

from envserve.errors import WorkerError
from envserve.pool.privileges import limits_of, popen_options
from envserve.pool.worker_states import Exit
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.worker.channel import Channel, Kind, pack_message
from envserve.worker.template import kill_group

__all__ = ["KILL_SECONDS", "Launcher", "WorkerProcess"]

_START: Final = (
    "import json, resource, sys; sys.path[:], limits = json.loads(sys.argv[2]); "
    "[resource.setrlimit(*limit) for limit in limits]; "
    "from envserve.worker.template import main; main(int(sys.argv[1]))"
)
_RESERVED_AT_ONCE: Final = 8
#: How long the template may stay silent while a fork is due; it may be importing.
_FORK_SECONDS: Final = 120.0
#: The socket holds some hundreds besides.
_MAX_UNSENT: Final = 1024
#: The exit status and the end of file come one after the other, or one does not come.
_EXIT_STATUS_GRACE_SECONDS: Final = 0.2
#: How long a process that was killed may take to end; the kernel may hold it.
KILL_SECONDS: Final = 5.0


class DescriptorReserve:
    """Descriptors that are kept: who enters can open some, whoever holds all others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self._hold(count)

    def _hold(self, count: int) -> None:
        while len(self._held) > count:
            os.close(self._held.pop())
        with contextlib.suppress(OSError):  # there are fewer now
            while len(self._held) < count:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def __enter__(self) -> None:
        self._hold(max(0, len(self._held) - _RESERVED_AT_ONCE))

    def __exit__(self, *_: object) -> None:
        self._hold(self._count)

    def close(self) -> None:
        """Lets go of all."""
        self._count = 0
        self._hold(0)


class WorkerProcess:
    """A worker process, as far as its launcher has heard of it, and how to talk to it.

    It has ended when its socket is at end of file; its exit status follows from the
    launcher.

    Attributes:
      number: Of the request to fork it.
      channel: The owner's end; the process ends when that is closed.
      pid: Its process id, once it is forked.
      exit: How it has ended, once that is known.
      killed_for: Why it was killed; else empty.
    """

    def __init__(self, launcher: Launcher, number: int, channel: Channel) -> None:
        """Knows nothing yet of a process that is about to be forked."""
        self.number = number
        self.channel = channel
        self.pid: int | None = None
        self.exit: Exit | None = None
        self.killed_for = ""
        self._at_end_since = self._killed_at = math.inf
        self._launcher = launcher

    def poll_exit(self) -> Exit | None:
        """Returns how the process ended, if that is known by now."""
        if self.exit is None:
            self._launcher.poll()
        return self.exit

    def wait_exit(self, timeout_seconds: float) -> Exit | None:
        """Waits until it is known how the process ended; None if that takes longer."""
        give_up_at = time.monotonic() + timeout_seconds
        while self.poll_exit() is None and (left := give_up_at - time.monotonic()) > 0:
            self._launcher.wait(left)
        return self.exit

    def has_ended(self, now: float) -> bool:
        """Tells whether the process is no more, and has said all it had to say."""
        is_at_end = self.channel.is_at_end
        if self.poll_exit() is not None or is_at_end:
            self._at_end_since = min(self._at_end_since, now)
        # A process that an env has started may hold the socket open for ever.
        return self.exit is not None and (is_at_end or self.is_overdue(now))

    def is_overdue(self, now: float) -> bool:
        """Tells whether one sign of its end is there, and the other does not come."""
        return now - self._at_end_since >= _EXIT_STATUS_GRACE_SECONDS

    def kill(self, reason: str, now: float, *, has_stack: bool = False) -> None:
        """Has the process and its children killed, for a reason; see `Launcher.kill`.

        Its exit status follows.
        """
        self.killed_for, self._killed_at = reason, now
        self._launcher.kill(self, has_stack=has_stack)

    def cannot_be_killed(self, now: float) -> bool:
        """Tells whether it was killed long ago, and has not ended."""
        # One that is not forked yet is the launcher's to wait for.
        is_late = now - self._killed_at >= KILL_SECONDS
        return is_late and self.pid is not None and self.exit is None

    def __repr__(self) -> str:
        state = self.exit or ("at end of file" if self.channel.is_at_end else "running")
        return f"<WorkerProcess pid {self.pid}, {state}>"


class Launcher:
    """Starts worker processes and hears of their end.

    One launcher may serve several pools of one process. Its `reserve` is for what they
    open. All methods are called from one thread at a time. A call that is interrupted
    midway costs the template, and with it its workers.
    """

    def __init__(
        self,
        import_modules: Iterable[str] = (),
        preload: Iterable[str] = (),
        num_reserved: int = 0,
        host: HostSettings | None = None,
    ) -> None:
        """Starts the template process; it imports while the caller goes on.

        Args:
          import_modules: Modules that workers shall have imported.
          preload: Names of envs whose modules are imported too, so that their workers
            start faster. Every fork waits for it. A worker of another env imports
            that env's module itself.
          num_reserved: How many descriptors to keep for workers.
          host: Limits of the processes, their user and their environment.
        """
        self.reserve = DescriptorReserve(num_reserved)
        self._import_modules = list(import_modules)
        self._preload = list(preload)
        self._limits, self._popen_options = limits_of(host), popen_options(host)
        self._clock = time.monotonic
        self._pending: dict[int, WorkerProcess] = {}  # by number
        self._running: dict[int, WorkerProcess] = {}  # by process id
        self._heard_at = 0.0  # or since when a fork is due, if that is later
        self._num_forks = 0
        self._is_midway = self._is_closed = False
        self._start_template()

    def _start_template(self) -> None:
        _open_streams()
        ours, theirs = _socket_pair()
        self._channel = Channel(ours)
        self._lost = ""
        self._has_imported = False
        with theirs:
            # Sent before there is anybody who could have ended already.
            self._send({"import": self._import_modules, "preload": self._preload})
            path = [os.path.abspath(entry) for entry in sys.path]
            start = json.dumps([path, self._limits])
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), start],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL if sys.stderr is None else None,
                    start_new_session=True,  # Ctrl-C is the owner's to handle
                    **self._popen_options,
                )
            except OSError as error:
                self._channel.close()
                self._lost = f"cannot run: {error}"
                raise WorkerError(f"{sys.executable} {self._lost}") from None

    def launch(
        self, selector: selectors.BaseSelector | None = None, owner: object = None
    ) -> WorkerProcess:
        """Asks for a worker process; `poll` fills in what becomes of it.

        The selector wakes its owner for the process's `channel`.

        Raises:
          WorkerError: The template process, which is started anew if need be,
            cannot run; or too many forks wait for it; or there are too few descriptors.
        """
        if self._is_closed:
            raise WorkerError(f"expected a launcher that is open; got {self!r}")
        self.poll()
        if self._lost:
            self._start_template()
        if len(self._channel.unsent) >= _MAX_UNSENT:
            raise WorkerError(
                f"expected less than {_MAX_UNSENT} messages that wait for the template "
                f"process; got more from {self!r}; start fewer workers at once"
            )
        with self.reserve:
            ours, theirs = _socket_pair()
        if not self._pending:
            self._heard_at = self._clock()
        self._num_forks += 1
        process = WorkerProcess(self, self._num_forks, Channel(ours, selector, owner))
        self._pending[process.number] = process
        self._send({"fork": process.number}, theirs)
        return process

    @property
    def has_imported(self) -> bool:
        """Whether the template has imported all modules, so that forks are quick."""
        self.poll()
        return self._has_imported

    def kill(self, process: WorkerProcess, *, has_stack: bool = False) -> None:
        """Kills a worker and the processes that its envs have started.

        The template does it, since only it knows whether the process id is still
        that worker's. A worker that has ended already is left alone. `has_stack` gives
        it a moment to write its Python stack to stderr first.
        """
        self.poll()  # which ends a template that an interrupt has left midway
        self._send({"kill": process.number, "stack": has_stack})

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
        while not self._lost and self._read():
            pass
        self._is_midway = False

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `poll` has something to read."""
        if not self._lost:
            self._channel.wait(timeout_seconds)

    def _read(self) -> bool:
        """Handles reports that have come; tells whether there may be more."""
        messages = self._channel.read()
        if self._channel.is_at_end:
            self._end_template("", is_gone=True)
        elif messages:
            self._heard_at = self._clock()
            for message in messages:
                self._on_message(codec.decode(message.payload))
        elif self._pending and self._clock() - self._heard_at > _FORK_SECONDS:
            modules = ", ".join([*self._import_modules, *self._preload])
            self._end_template(
                f"took longer than {_FORK_SECONDS:g} s to fork a worker; is an "
                f"import stuck ({modules or 'gymnasium'})? It "
            )
        return bool(messages)

    def close(self) -> None:
        """Ends the template process; workers that still run are killed with it."""
        self._is_closed = True
        self.reserve.close()
        if not self._lost:
            self._end_template("", is_gone=True)

    def _send(
        self, message: dict[str, Any], theirs: socket.socket | None = None
    ) -> None:
        """Sends a message, and the socket that goes with it; repeats are dropped."""
        self._is_midway = True
        data = pack_message(Kind.FORK, payload=codec.encode(message))
        if (data, None) not in self._channel.unsent:
            self._channel.send(data, theirs)
        self._is_midway = False

    def _on_message(self, message: dict[str, Any]) -> None:
        if "imported" in message:
            self._has_imported = message["imported"]
        elif "exit" in message and message["pid"] in self._running:
            tail = message["stderr"].decode(errors="backslashreplace")
            end = Exit(message["pid"], message["exit"], stderr_tail=tail)
            self._running[message["pid"]].exit = end
            del self._running[message["pid"]]
        elif message.get("fork") in self._pending:
            process = self._pending[message["fork"]]
            if "error" in message:
                process.exit = Exit(0, 1, message["error"])
            else:
                self._running[message["pid"]] = process
                process.pid = message["pid"]
            del self._pending[message["fork"]]  # last: here an interrupt finds it

    def _end_template(self, why: str, *, is_gone: bool = False) -> None:
        """Has the template be no more; its workers die with it.

        Args:
          why: What its end is to be told with.
          is_gone: Whether it may have a moment to end by itself.
        """
        self._channel.close()
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
        for pid, process in self._running.items():
            # On Linux the kernel has done it, if the template is dead indeed.
            if sys.platform != "linux" or self._process.returncode is None:
                kill_group(pid)
            process.exit = Exit(pid, -signal.SIGKILL)
        for process in self._pending.values():
            if process.exit is None:
                process.exit = Exit(0, 1, f"the template process {why}{end}")
        self._running, self._pending = {}, {}
        self._lost = why + end
        self._is_midway = False

    def __repr__(self) -> str:
        state = self._lost or f"{len(self._running)} workers"
        return f"<Launcher pid {self._process.pid}, {state}>"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise WorkerError(f"no socket for a worker: {error}") from None


def _open_streams() -> None:
    """Opens what is closed of 0 to 2, or the next descriptor would be a stream."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
