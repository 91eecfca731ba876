"""Start worker processes through a template process that forks them.

The template (`envserve.worker.template`) imports gymnasium and the user's env modules
once, so that workers start in milliseconds. Only `close` blocks on the template:
`launch` and `kill` send a request, and `poll` later reads the report about it.

If the launcher's process ends, even by SIGKILL, the template reads end of file from its
socket, kills the workers and exits. If the template ends or hangs, its workers are
killed and reported as ended, and the next `launch` starts a new template. The template
replies to each request, so a template that an env has suspended (SIGSTOP) is detected.
"""

from __future__ import annotations

import json
import logging
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

from envserve.errors import EnvStartError, WorkerError, raise_if_from_handler
from envserve.pool.privileges import popen_options, resource_limits
from envserve.pool.worker_states import Exit
from envserve.python_process import python_command, search_path
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.worker import unpatched
from envserve.worker.channel import Channel, MessageKind, pack_message
from envserve.worker.template import kill_group

_LOGGER: Final = logging.getLogger(__name__)

#: Code that the template process runs.
_TEMPLATE_CODE: Final = (
    "import json, resource; "
    "[resource.setrlimit(*limit) for limit in json.loads(sys.argv[2])]; "
    "from envserve.worker.template import main; main(int(sys.argv[1]))"
)
#: Number of reserved descriptors that are freed while a `DescriptorReserve` is active.
_NUM_FREED: Final = 8
#: Maximum time without a report while a fork is pending, including the time for
#: imports. After this time, the template is killed.
_FORK_TIMEOUT_SECONDS: Final = 120.0
#: Maximum time without a report while a request is pending and a signal such as SIGSTOP
#: has suspended the template. It is shorter than `KILL_SECONDS`.
_SUSPENDED_SECONDS: Final = 2.0
#: Maximum number of queued requests, in addition to a few hundred in the socket's
#: buffer.
_MAX_UNSENT: Final = 1024
#: Each exit produces an exit status and an end of file. If only one of the two has
#: arrived after this time, the other one is considered missing.
_EXIT_STATUS_GRACE_SECONDS: Final = 0.2
#: Time for a killed process to end. A process that is blocked in the kernel may take
#: longer.
KILL_SECONDS: Final = 5.0


class DescriptorReserve:
    """Reserve of open file descriptors, some of which can be freed when needed.

    While the context manager is active, a few descriptors are free even if the process
    is at its limit.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._fds: list[int] = []
        self._resize(count)

    def _resize(self, count: int) -> None:
        while len(self._fds) > count:
            os.close(self._fds.pop())
        try:
            while len(self._fds) < count:
                self._fds.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:  # no descriptors are left
            raise_if_from_handler(error)

    def __enter__(self) -> None:
        self._resize(max(0, len(self._fds) - _NUM_FREED))

    def __exit__(self, *_: object) -> None:
        self._resize(self._count)

    def close(self) -> None:
        """Close all reserved descriptors."""
        self._count = 0
        self._resize(0)


class WorkerProcess:
    """The launcher's view of a worker process, and the channel to it.

    Attributes:
      fork_number: Number of the fork request for this process.
      channel: The pool's end of the socket pair; closing it makes the process exit.
      worker_end: The worker's end, which the template receives; closed once the process
        is forked, or earlier (see `Channel.send`).
      pid: Process id; None until the process is forked.
      exit: Exit of the process; None until it is known.
      kill_reason: Reason for killing the process; empty if it was not killed.
    """

    def __init__(
        self,
        launcher: Launcher,
        fork_number: int,
        channel: Channel,
        worker_end: socket.socket,
    ) -> None:
        """Store the arguments; the process is not forked yet."""
        self.fork_number = fork_number
        self.channel = channel
        self.worker_end = worker_end
        self.pid: int | None = None
        self.exit: Exit | None = None
        self.kill_reason = ""
        self._ended_since = self._killed_at = math.inf
        self._launcher = launcher

    def poll_exit(self) -> Exit | None:
        """Return the exit of the process; None if it is not known yet."""
        if self.exit is None:
            self._launcher.poll()
        return self.exit

    def wait_exit(self, timeout_seconds: float) -> Exit | None:
        """Wait for the process to exit; return its exit, or None after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while (
            self.poll_exit() is None and (remaining := deadline - time.monotonic()) > 0
        ):
            self._launcher.wait(remaining)
        return self.exit

    def has_ended(self, now: float) -> bool:
        """Return whether the process has ended and its last message was read."""
        is_at_end = self.channel.is_at_eof
        if self.poll_exit() is not None or is_at_end:
            self._ended_since = min(self._ended_since, now)
        # End of file may never come: a child of the process may keep the socket open.
        return self.exit is not None and (is_at_end or self.is_overdue(now))

    def is_overdue(self, now: float) -> bool:
        """Return whether the exit status or end of file came at least 0.2 s ago."""
        return now - self._ended_since >= _EXIT_STATUS_GRACE_SECONDS

    def kill(self, reason: str, now: float, *, wants_stack: bool = False) -> None:
        """Kill the process and its children; see `Launcher.kill`.

        `exit` is set once the process has ended.
        """
        self.kill_reason, self._killed_at = reason, now
        self._launcher.kill(self, wants_stack=wants_stack)

    def cannot_be_killed(self, now: float) -> bool:
        """Return whether the process is still running long after it was killed."""
        # The launcher has its own timeout for processes that are not forked yet.
        is_late = now - self._killed_at >= KILL_SECONDS
        return is_late and self.pid is not None and self.exit is None

    def __repr__(self) -> str:
        state = self.exit or ("at end of file" if self.channel.is_at_eof else "running")
        return f"<WorkerProcess pid {self.pid}, {state}>"


class Launcher:
    """Starts worker processes and reports their exits.

    Several pools in a process may share a launcher. Only one thread at a time may call
    its methods. If an exception interrupts a method, the template and all its workers
    are killed.

    Attributes:
      reserve: Spare descriptors, for files that pools open.
      import_note: Warning that imported modules have started threads, which forked
        workers do not have, with the remedy; "" if there are no such threads.
      ends_in_import: Whether an import ended the template before any template had
        imported all modules. A new template would probably end in the same import.
    """

    def __init__(
        self,
        import_modules: Iterable[str] = (),
        preload: Iterable[str] | None = (),
        num_reserved: int = 0,
        host: HostSettings | None = None,
        lists_names: bool = False,
    ) -> None:
        """Start the template process, which imports the modules in the background.

        Args:
          import_modules: Modules to import before any fork.
          preload: Names of envs whose modules are also imported, so that their workers
            start faster. Every fork waits for these imports. Workers of other envs
            import the env's module themselves. If None, the template imports nothing,
            and each worker imports all of these modules after the fork.
          num_reserved: Number of descriptors to reserve for workers.
          host: User, environment and resource limits of the processes.
          lists_names: Whether the template lists the envs on offer; see `wait_names`.
        """
        self.import_note = ""
        self.ends_in_import = False
        self.reserve = DescriptorReserve(num_reserved)
        self._import_modules = list(import_modules)
        self._preload = None if preload is None else list(preload)
        self._lists_names = lists_names
        self._names: tuple[str, ...] | None = None
        self._names_error = ""
        self._limits, self._popen_options = resource_limits(host), popen_options(host)
        self._clock = time.monotonic
        self._pending: dict[int, WorkerProcess] = {}  # by fork number
        self._kills: set[int] = set()  # fork numbers of unanswered kill requests
        self._running: dict[int, WorkerProcess] = {}  # by process id
        #: Time from which the template's silence is measured: the time of its last
        #: report or, if no request was pending then, of the first request after that.
        self._last_report_at = self._clock()
        self._num_forks = 0
        self._has_ever_imported = False
        self._is_updating = self._is_closed = False
        self._start_template()

    def _start_template(self) -> None:
        own_end, template_end = _socket_pair()
        self._channel = Channel(own_end)
        self._template_error = ""
        self._has_imported = False
        self._importing = ""  # the module or env whose import is in progress
        with template_end:
            # Send the modules before the template starts. Then, a template that ends
            # immediately cannot cause an error in `_send`, and an error in `_send`
            # leaves no process behind.
            self._send(
                {
                    "import": self._import_modules,
                    "preload": self._preload,
                    "lists_names": self._lists_names,
                }
            )
            command = python_command(
                _TEMPLATE_CODE,
                str(template_end.fileno()),
                json.dumps(self._limits),
                path=search_path(),
            )
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[template_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL if sys.stderr is None else None,
                    process_group=0,  # Ctrl-C must reach only the owner
                    **self._popen_options,
                )
            except BaseException as error:
                self._channel.close()  # ends the template, which may run already
                if not isinstance(error, OSError):  # an interrupt
                    raise
                raise_if_from_handler(error)
                self._template_error = f"cannot run: {error}"
                if isinstance(error, PermissionError) and "user" in self._popen_options:
                    self._template_error += "; let the user of --worker-user run it"
                raise WorkerError(f"{command[0]} {self._template_error}") from None

    def launch(
        self,
        selector: selectors.BaseSelector | None = None,
        selector_data: object = None,
    ) -> WorkerProcess:
        """Request and return a worker process; `poll` later sets its pid or its exit.

        The process's channel is registered with the selector, if any, and the data.

        Raises:
          WorkerError: The template cannot be started, too many requests are queued, or
            no descriptors are left.
        """
        if self._is_closed:
            raise WorkerError(f"expected an open launcher; got {self!r}")
        self.poll()
        if self._template_error:
            with self.reserve:
                self._start_template()
        if len(self._channel.unsent) >= _MAX_UNSENT:
            raise WorkerError(
                f"{self!r}: expected fewer than {_MAX_UNSENT} queued messages to the "
                f"template process; got {len(self._channel.unsent)}; start fewer "
                f"workers at the same time"
            )
        with self.reserve:
            own_end, worker_end = _socket_pair()
        self._expect_report()
        self._num_forks += 1
        channel = Channel(own_end, selector, selector_data)
        process = WorkerProcess(self, self._num_forks, channel, worker_end)
        # In this order, an interrupt leaves no request pending that was never sent.
        self._send({"fork": process.fork_number}, worker_end)
        self._pending[process.fork_number] = process
        return process

    @property
    def has_imported(self) -> bool:
        """Whether the template has imported all modules, so that forks are fast."""
        self.poll()
        return self._has_imported

    def wait_names(self, timeout_seconds: float) -> tuple[str, ...] | None:
        """Wait for the imports; return the names of the envs on offer, sorted.

        The envs on offer are those in `preload` or, if it is empty, all registered
        envs.

        Returns:
          The names, or None if the imports still run after the timeout.

        Raises:
          EnvStartError: A module cannot be imported, or it ends its process; a name is
            not registered; or a file registers no env.
        """
        self.wait(timeout_seconds)
        self.poll()
        if self._names is None and self._template_error:
            raise EnvStartError(f"the template process {self._template_error}")
        if self._names_error:
            raise EnvStartError(self._names_error)
        return self._names

    def kill(self, process: WorkerProcess, *, wants_stack: bool = False) -> None:
        """Ask the template to kill a worker and all processes that its envs started.

        Only the template can do this safely, because a process id may be reused once
        its parent has reaped it. A worker that has already ended is ignored. With
        `wants_stack`, the worker may first write its Python stack to stderr.
        """
        self.poll()  # kills the template if an earlier call was interrupted
        if not self._template_error:
            self._expect_report()
            self._kills.add(process.fork_number)
        self._send({"kill": process.fork_number, "stack": wants_stack})

    def _expect_report(self) -> None:
        if not (self._pending or self._kills):
            self._last_report_at = self._clock()

    def poll(self) -> None:
        """Read the reports of the template and send queued requests; do not wait.

        The template is killed, and all its workers are reported as ended, if a request
        is pending and the template has reported nothing for 120 s. If a signal such as
        SIGSTOP has suspended the template, the limit is 2 s; this limit also applies
        while `wait_names` waits.
        """
        if self._template_error:
            return
        if self._is_updating:
            self._importing = ""  # do not blame the module that is being imported
            self._stop_template("was interrupted, and ")
            return
        self._is_updating = True
        while not self._template_error and self._read():
            pass
        self._is_updating = False

    def wait(self, timeout_seconds: float) -> None:
        """Wait until `poll` can read reports or send requests, or until the timeout.

        The wait is at most 2 s, so that `poll` detects a suspended template in time.
        """
        if not self._template_error:
            self._channel.wait(min(timeout_seconds, _SUSPENDED_SECONDS))

    def _read(self) -> bool:
        """Process received reports; return whether more reports may follow."""
        messages = self._channel.read()
        has_requests = bool(self._pending or self._kills)
        if self._channel.is_at_eof:
            self._stop_template("", is_exiting=True)
        elif messages:
            self._last_report_at = self._clock()
            for message in messages:
                self._on_message(codec.decode(message.payload))
        elif has_requests or (self._lists_names and self._names is None):
            silent_seconds = self._clock() - self._last_report_at
            if has_requests and silent_seconds > _FORK_TIMEOUT_SECONDS:
                modules = ", ".join([*self._import_modules, *(self._preload or ())])
                self._importing = ""  # the import may succeed in a new template
                self._stop_template(
                    f"took longer than {_FORK_TIMEOUT_SECONDS:g} s to fork a worker; "
                    f"is an import stuck ({modules or 'gymnasium'})? It "
                )
            elif silent_seconds > _SUSPENDED_SECONDS and self._is_suspended():
                self._stop_template("was suspended by a signal, and ")
        return bool(messages)

    def _is_suspended(self) -> bool:
        """Return whether a signal, such as SIGSTOP, has suspended the template.

        On macOS before Python 3.13, this is not known, and the result is False.
        """
        if unpatched.waitid is None:
            return False
        flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            return unpatched.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # the template has ended
            return False

    def close(self) -> None:
        """Stop the template process; this also kills all running workers."""
        self._is_closed = True
        self.reserve.close()
        if not self._template_error:
            self._stop_template("", is_exiting=True)

    def _send(
        self, message: dict[str, Any], passed_socket: socket.socket | None = None
    ) -> None:
        """Send a request with a socket, if given; do not queue a kill twice."""
        self._is_updating = True
        data = pack_message(MessageKind.FORK, payload=codec.encode(message))
        if (data, None) not in self._channel.unsent:
            self._channel.send(data, passed_socket)
        self._is_updating = False

    def _on_message(self, message: dict[str, Any]) -> None:
        if "importing" in message:
            self._importing = message["importing"]
        elif "imported" in message:
            self._importing, self._has_ever_imported = "", True
            self._has_imported = message["imported"]
            self.import_note = message["note"]
            self._names, self._names_error = (*message["names"],), message["error"]
            for failure in message["failures"] if self._lists_names else ():
                _LOGGER.warning("workers cannot create %s", failure)
        elif "kill" in message:
            self._kills.discard(message["kill"])
        elif "exit" in message and message["pid"] in self._running:
            tail = message["stderr"].decode(errors="backslashreplace")
            end = Exit(message["pid"], message["exit"], stderr_tail=tail)
            self._running[message["pid"]].exit = end
            del self._running[message["pid"]]
        elif message.get("fork") in self._pending:
            process = self._pending[message["fork"]]
            process.worker_end.close()
            if "error" in message:
                process.exit = Exit(0, 1, message["error"], lacks_resources=True)
            else:
                self._running[message["pid"]] = process
                process.pid = message["pid"]
            # Delete the entry last: if an interrupt prevents it, `_stop_template` will
            # set the exit of the process.
            del self._pending[message["fork"]]

    def _stop_template(self, reason: str, *, is_exiting: bool = False) -> None:
        """Stop the template process, and report the exits of its workers.

        Args:
          reason: Beginning of the message that reports why the template stopped.
          is_exiting: Whether the template is already exiting; it is then killed only if
            the exit takes too long.
        """
        try:
            # This ends the connection even if a forked child has inherited the socket.
            self._channel.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # the template has closed its end
            raise_if_from_handler(error)
        self._channel.close()
        if not is_exiting:
            self._process.kill()
        end, process_exit = "cannot be killed", None
        for _ in range(2):
            try:
                exit_code = self._process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:  # an import may take longer
                self._process.kill()
            else:
                process_exit = Exit(self._process.pid, exit_code)
                end = str(process_exit)
                break
        if self._importing and not self._is_closed:
            self.ends_in_import = not self._has_ever_imported
            if process_exit is not None:
                end = process_exit.describe_while(f"imported {self._importing}")
        for pid, process in self._running.items():
            # On Linux, the kernel kills the workers together with the template.
            if sys.platform != "linux" or self._process.returncode is None:
                kill_group(pid)
            process.exit = Exit(pid, -signal.SIGKILL)
        for process in self._pending.values():
            process.worker_end.close()
            if process.exit is None:
                process.exit = Exit(0, 1, f"the template process {reason}{end}")
        num_killed = len(self._running)
        self._running, self._pending, self._kills = {}, {}, set()
        self._template_error = reason + end
        if reason or (num_killed and not self._is_closed):
            _LOGGER.warning(
                "the template process (pid %d) %s%s, and %d workers with it; a new "
                "template forks the next workers",
                self._process.pid,
                reason,
                end,
                num_killed,
            )
        self._is_updating = False

    def __repr__(self) -> str:
        state = self._template_error or f"{len(self._running)} workers"
        return f"<Launcher pid {self._process.pid}, {state}>"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        _ensure_standard_streams()
        return socket.socketpair()
    except OSError as error:
        raise_if_from_handler(error)
        raise WorkerError(f"cannot create a socket for a worker: {error}") from None


def _ensure_standard_streams() -> None:
    """Open descriptors 0 to 2 if they are closed, so that no socket uses them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
