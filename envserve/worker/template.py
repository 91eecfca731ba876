"""The process from which workers are forked.

A launcher starts one template process. The template imports gymnasium and the user's
env modules once, so that a fork starts a worker in milliseconds and shares the pages of
these modules. It does five things: import modules, fork workers, kill workers and the
processes that their envs leave behind, forward the workers' stderr, and report exits.

The template has a single thread, because a fork would copy locks that other threads
hold, without the threads that release them. If an imported module starts a thread, the
template reports the thread, because workers may then hang. One `poll` waits for
requests from the owner, for SIGCHLD (through a wakeup socket) and for the stderr pipes.
The template must not block, because several pools share it.

Imported modules may change signal handlers, the signal mask and the standard streams.
The template depends on their previous state, and restores it after the import.

Only the template can kill a worker safely, because it is the parent: a process id is
not reused until the parent has reaped the process. Each worker leads a process group
that is killed together with the worker. Grandchildren that have left the group are
adopted by the template (as a subreaper, on Linux) and also killed.

The template and the workers stay in the owner's session, because Linux may schedule
each session as a group (autogroup). A worker that polls yields its core only to
processes of the same group, so an owner in another session would wait until the worker
has stopped polling.

If the owner exits, even by SIGKILL, the template reads end of file from its socket,
kills all workers and exits. On Linux, the kernel also sends SIGCONT to the template (by
PR_SET_PDEATHSIG). This signal resumes a template that an env has suspended, and makes
the template check its parent, because it does not read its socket during an import, and
there is no end of file if a forked child of the owner keeps the socket open. If the
template is killed, the kernel kills the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import io
import math
import os
import select
import signal
import socket
import sys
import termios
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from envserve.envs.user_envs import split_reference
from envserve.errors import EnvserveError
from envserve.python_process import python_command
from envserve.spaces import codec
from envserve.text import message_of, one_line
from envserve.worker import unpatched
from envserve.worker.channel import MessageDecoder, MessageKind, pack_message
from envserve.worker.orphans import child_processes
from envserve.worker.stderr_pipes import StderrPipes

_IOLBF: Final = 1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Signal that makes a worker write its Python stack to stderr, unless an env has
#: replaced the handler.
_STACK_SIGNAL: Final = signal.SIGUSR2
#: The C stack that Python 3.14 appends would displace the Python stack from the last
#: 4 KiB of stderr, which are reported.
_STACK_OPTIONS: Final = {"c_stack": False} if sys.version_info >= (3, 14) else {}
#: Maximum time for a worker to write its stack before it is killed.
_STACK_SECONDS: Final = 0.08
#: Maximum time for the rest of the stack, once its first part has arrived.
_STACK_REST_SECONDS: Final = 0.005
#: Delay between the exit of a child and the search for orphans, so that a single search
#: is enough if many children exit together.
_ORPHAN_DELAY_SECONDS: Final = 0.1
#: Maximum time for the interpreter to exit; it waits for threads of imported modules.
_EXIT_SECONDS: Final = 0.4
#: Maximum time to kill all processes. The owner waits one second for the template to
#: exit.
_KILL_ALL_SECONDS: Final = 0.5
#: Amount added to a worker's OOM score (at most 1000). When memory runs out, the kernel
#: kills the process with the highest score.
_OOM_SCORE_INCREASE: Final = 500


def main(fd: int) -> None:
    """Run the template process, connected to its owner by the socket `fd`."""
    faulthandler.enable(2)  # print the Python stack if an import crashes in C code
    _leave_terminal()
    # Processes started by envs must not inherit the connection to the owner.
    os.set_inheritable(fd, False)
    owner = socket.socket(fileno=fd)
    owner.settimeout(None)
    sys.argv = [""]  # modules and envs must not parse the arguments of this process
    os.dup2(2, 1)  # the stdout of envs must not mix with the owner's output
    _write_lines_at_once()
    template = _Template(owner)
    # Register `close` before multiprocessing registers its exit handler: exit handlers
    # run in reverse order, and a `Pool` restarts killed processes until the handler of
    # multiprocessing has run.
    atexit.register(template.close)
    # Import these modules here, because importing this file must not load gymnasium.
    # Import them before the user's modules, which may drop permissions to read files.
    from multiprocessing import resource_tracker, util  # noqa: F401

    from envserve.worker import process  # noqa: F401

    template.run()


def _leave_terminal() -> None:
    """Detach from the terminal, so that reading from it does not stop an env."""
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def _write_lines_at_once() -> None:
    """Make Python and C write each line of stdout at once.

    A worker would lose buffered output when it is killed, or when it exits, because it
    exits without flushing the buffers of C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if (stream := _stdout_of_c()) is not None:
        ctypes.CDLL(None).setvbuf(stream, None, _IOLBF, ctypes.c_size_t(0))


def _flush_stdout() -> None:
    """Write unfinished lines of Python and C."""
    with contextlib.suppress(Exception):  # an import may have closed the stream
        sys.stdout.flush()
    if (stream := _stdout_of_c()) is not None:
        ctypes.CDLL(None).fflush(stream)


def _stdout_of_c() -> ctypes.c_void_p | None:
    """Return the FILE pointer of stdout; None if the C library does not export it."""
    name = "stdout" if sys.platform == "linux" else "__stdoutp"
    with contextlib.suppress(ValueError):
        return ctypes.c_void_p.in_dll(ctypes.CDLL(None), name)
    return None


class _Template:
    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._wakeup, wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        self._standard_fds = [os.dup(fd) for fd in range(3)]
        self._are_blocking = [os.get_blocking(fd) for fd in range(3)]
        self._pid, self._owner_pid = os.getpid(), os.getppid()
        self._undo_import_effects()
        self._decoder = MessageDecoder()
        self._fds: list[int] = []
        self._import_error = ""
        self._worker_imports: list[str] = []  # modules that each worker imports itself
        self._workers: dict[int, int] = {}  # maps fork numbers to process ids
        #: Maps the fork numbers of workers that write their stack to the time of the
        #: kill.
        self._kill_at: dict[int, float] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "linux":
            # Adopt processes that leave a worker's group by setsid or a double fork.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            # The kernel also sends this signal when only the thread of the owner that
            # started the template ends. In this case, the signal has no effect.
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        self._import_children: set[int] = set()  # started by imported modules
        # Process id of multiprocessing's resource tracker, and, until the tracker is
        # started, the read end of its pipe.
        self._tracker_pid: int | None = None
        self._tracker_fd = -1
        self._kill_orphans_at = math.inf
        self._poller = unpatched.poll()
        self._poller.register(self._owner, select.POLLIN)
        self._poller.register(self._wakeup, select.POLLIN)
        self._pipes = StderrPipes(self._poller)

    def _undo_import_effects(self) -> None:
        """Undo changes by imported modules that would break the template."""
        for number in (signal.SIGCHLD, signal.SIGCONT):
            # Without a handler, the signal would not be written to the wakeup socket.
            unpatched.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        # With SIGPIPE ignored, a write to a closed pipe only returns an error.
        unpatched.signal(signal.SIGPIPE, signal.SIG_IGN)
        # A timer that a module has started could end the process when it expires.
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd, saved_fd in enumerate(self._standard_fds):
            os.dup2(saved_fd, fd)
            # The owner's descriptor shares these flags. If a module made it
            # non-blocking, the owner's output would fail.
            os.set_blocking(fd, self._are_blocking[fd])

    def run(self) -> None:
        """Handle requests until the owner closes its end of the socket or dies."""
        try:
            self._loop()
        finally:
            unpatched.signal(signal.SIGALRM, self._exit_at_once)
            signal.setitimer(signal.ITIMER_REAL, _EXIT_SECONDS)

    def _exit_at_once(self, *_: object) -> None:
        self._kill_all()
        os._exit(1)

    def _exit_without_owner(self, *_: object) -> None:
        # A child that an imported module forks inherits this signal handler.
        if os.getpid() == self._pid and os.getppid() != self._owner_pid:
            self._exit_at_once()

    def close(self) -> None:
        """Kill the processes that workers and modules have left behind (on Linux)."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._kill_all()
        signal.set_wakeup_fd(-1)  # the handler must not write to a closed socket
        for endpoint in (self._owner, self._wakeup, self._wakeup_writer):
            endpoint.close()

    def _loop(self) -> None:
        while True:
            for fd, _ in self._poller.poll(self._kill_overdue()):
                worker = self._pipes.worker_of(fd)
                if worker in self._kill_at:
                    kill_at = unpatched.monotonic() + _STACK_REST_SECONDS
                    self._kill_at[worker] = min(self._kill_at[worker], kill_at)
                if self._pipes.handle(fd):
                    continue
                if fd == self._tracker_fd:
                    self._start_resource_tracker()
                if fd == self._wakeup.fileno():
                    self._reap()
                if os.getppid() != self._owner_pid or (
                    fd == self._owner.fileno() and not self._handle_requests()
                ):
                    for pid in self._workers.values():
                        kill_group(pid)
                    self._pipes.close()
                    return

    def _kill_all(self) -> None:
        deadline = unpatched.monotonic() + _KILL_ALL_SECONDS
        wakeup = unpatched.poll()
        wakeup.register(self._wakeup, select.POLLIN)
        # The resource tracker exits by itself.
        while remaining := {*_child_pids()} - {self._tracker_pid}:
            if unpatched.monotonic() >= deadline:
                return
            for pid in remaining:
                kill_group(pid)
            wakeup.poll(50)
            self._drain_wakeups()
            with contextlib.suppress(ChildProcessError):
                while unpatched.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _kill_overdue(self) -> int | None:
        """Kill the workers, and the orphans of exited workers, whose time has run out.

        Return the milliseconds until the next deadline, or None if there is none.
        """
        now = unpatched.monotonic()
        if now >= self._kill_orphans_at:
            self._kill_orphans_at = math.inf
            self._kill_orphans(_child_pids())
        overdue = [
            fork_number for fork_number, due in self._kill_at.items() if due <= now
        ]
        for fork_number in overdue:
            del self._kill_at[fork_number]
            if fork_number in self._workers:
                kill_group(self._workers[fork_number])
        next_at = min([*self._kill_at.values(), self._kill_orphans_at])
        return None if next_at == math.inf else math.ceil(1000 * (next_at - now))

    def _kill_orphans(self, children: Iterable[int]) -> None:
        """Kill the children that are neither workers nor started by an import."""
        known = {*self._import_children, *self._workers.values()}
        for pid in {*children} - known:
            kill_group(pid)

    def _kill(self, fork_number: int, wants_stack: bool) -> None:
        pid = self._workers.get(fork_number)
        if pid is None:
            return
        if not wants_stack:
            kill_group(pid)
        elif fork_number not in self._kill_at:
            self._kill_at[fork_number] = unpatched.monotonic() + _STACK_SECONDS
            os.kill(pid, _STACK_SIGNAL)  # safe: the process is not reaped yet

    def _handle_requests(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._owner, 1 << 16, 64)
        except ConnectionError:
            return False
        self._fds += fds
        for received in self._decoder.feed(data):
            message = codec.decode(received.payload)
            if "import" in message:
                self._import(
                    message["import"], message["preload"], message["lists_names"]
                )
                self._import_children = {*_child_pids()}
            elif "kill" in message:
                self._kill(message["kill"], message["stack"])
                self._report({"kill": message["kill"]})
            elif self._fds:
                self._fork(message["fork"], self._fds.pop(0))
            else:  # the kernel has dropped a descriptor beyond the process's limit
                error = "the template process has no descriptors left"
                self._report({"fork": message["fork"], "error": error})
        return bool(data)

    def _import(
        self, modules: list[str], env_names: list[str] | None, lists_names: bool
    ) -> None:
        from envserve.envs import registry
        from envserve.worker.process import import_error
        from envserve.worker.worker_report import utf8_tail

        if env_names is None:
            self._worker_imports = modules
            modules, env_names = [], []
        # The owner may end during an import that hangs. There are no workers yet.
        unpatched.signal(signal.SIGCONT, self._exit_without_owner)
        self._exit_without_owner()
        # Maps thread ids to the module files whose import started the threads, or to ""
        # for threads that the template had before.
        file_of_thread = dict.fromkeys(thread_ids(), "")
        failures = []
        for index, name in enumerate((*modules, *env_names)):
            self._report({"importing": name})
            if index >= len(modules):
                # A worker will raise the same error, and report it with a traceback.
                try:
                    registry.preload(name)
                except BaseException as failure:
                    failures.append(one_line(f"{name}: {message_of(failure)}", 400))
            elif not self._import_error:
                self._import_error = import_error(name)
            file = Path(split_reference(name)[0]).name
            file_of_thread = dict.fromkeys(thread_ids(), file) | file_of_thread
        names, error = [], self._import_error
        if lists_names and not error:
            if not (modules or env_names):
                self._report({"importing": "the env modules of installed packages"})
            try:
                names = [*registry.offered_names(env_names or None)]
            except EnvserveError as names_error:
                error = str(names_error)
        self._undo_import_effects()
        self._share_resource_tracker()
        gc.collect()
        gc.freeze()  # garbage collections must not write to pages that forks share
        note, files = "", [*filter(None, map(file_of_thread.get, thread_ids()))]
        if files:  # one for each thread that an import has started
            note = (
                f"importing {', '.join(sorted({*files}))} started {len(files)} "
                f"thread{'s' * (len(files) > 1)}, which forked workers do not have; "
                f"start threads in the env's constructor, or use preload=False "
                f"(--no-preload); see 'What forking means for envs' in the docs"
            )
        # A server that can create none of its envs must not become ready.
        has_envs = len(failures) < len(env_names) or not env_names
        self._report(
            {
                "imported": has_envs and not self._import_error,
                "note": note,
                "names": names,
                "error": utf8_tail(error),
                "failures": failures,
            }
        )

    def _share_resource_tracker(self) -> None:
        """Make all workers use one resource tracker of multiprocessing.

        When all workers have ended, the tracker removes the shared memory that they
        have left behind. A worker's own tracker would be killed with the worker. The
        shared one is started when a worker first writes to its pipe.
        """
        from multiprocessing import resource_tracker

        tracker = vars(resource_tracker._resource_tracker)
        if tracker["_fd"] is None:  # no imported module has started a tracker
            self._tracker_fd, tracker["_fd"] = os.pipe()
            self._poller.register(self._tracker_fd, select.POLLIN)
        self._tracker_pid = tracker["_pid"]

    def _start_resource_tracker(self) -> None:
        fd, self._tracker_fd = self._tracker_fd, -1
        self._poller.unregister(fd)
        from multiprocessing.util import spawnv_passfds

        code = f"from multiprocessing.resource_tracker import main; main({fd})"
        command = python_command(code)
        # If this fails, each worker starts its own tracker, because the shared pipe has
        # no reader.
        with contextlib.suppress(OSError):
            self._tracker_pid = spawnv_passfds(os.fsencode(command[0]), command, [fd])
            self._import_children.add(self._tracker_pid)
        os.close(fd)

    def _fork(self, fork_number: int, fd: int) -> None:
        # Do not import anything at this point: it would delay kills and forks of other
        # pools.
        parent = os.getpid()
        stderr_fd = self._pipes.open(fork_number)
        fds = [fd] if stderr_fd is None else [fd, stderr_fd]
        _flush_stdout()  # because every fork would print an unfinished line again
        try:
            pid = unpatched.fork()
        except OSError as error:  # out of memory, or too many processes
            for passed_fd in fds:
                os.close(passed_fd)
            self._pipes.finish(fork_number)
            limits = "memory and its limits on processes (ulimit -u, pids.max)"
            text = f"{error}; check this host's {limits}"
            self._report({"fork": fork_number, "error": text})
            return
        if pid == 0:
            self._run_worker(parent, fd, stderr_fd)
        for passed_fd in fds:
            os.close(passed_fd)
        self._workers[fork_number] = pid
        self._report({"fork": fork_number, "pid": pid})

    def _run_worker(self, parent: int, fd: int, stderr_fd: int | None) -> None:
        from envserve.worker import process

        code = 1
        try:
            if sys.platform == "linux":
                # A worker that wakes up must not preempt the process that is still
                # sending steps to other workers. The system may forbid SCHED_BATCH.
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpgid(0, 0)  # so that the worker's children can be killed with it
            if sys.platform == "linux":
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                # Orphans become this worker's children while it lives, so that the
                # template does not kill them before the worker has ended.
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
                _raise_oom_score()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGCONT):
                unpatched.signal(number, signal.SIG_DFL)
            for other in (self._owner, self._wakeup, self._wakeup_writer):
                other.close()
            for other_fd in (*self._fds, *self._standard_fds):
                os.close(other_fd)
            if self._tracker_fd >= 0:
                os.close(self._tracker_fd)
            self._pipes.close_in_worker()
            if stderr_fd is not None:
                os.dup2(stderr_fd, 1)
                os.dup2(stderr_fd, 2)
                os.close(stderr_fd)
            # Print the Python stack of a crash in C code.
            faulthandler.enable(2, all_threads=False, **_STACK_OPTIONS)
            faulthandler.register(_STACK_SIGNAL, 2, all_threads=False)
            os.set_inheritable(fd, False)
            channel = unpatched.socket(fileno=fd)
            channel.settimeout(None)  # modules may change the default timeout
            process.run(channel, self._worker_imports, self._import_error)
            code = 0
        except BaseException:
            # The exception must not reach the callers of this function, because they
            # belong to the template.
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _reap(self) -> None:
        self._drain_wakeups()
        while (reaped := self._reap_child()) is not None:
            pid, status = reaped
            if pid not in self._workers.values():
                continue  # an orphan, or a child of an imported module
            (fork_number,) = [
                key for key, worker in self._workers.items() if worker == pid
            ]
            del self._workers[fork_number]
            code = os.waitstatus_to_exitcode(status)
            tail = self._pipes.finish(fork_number, is_reported=code != 0)
            self._report({"pid": pid, "exit": code, "stderr": tail})

    def _reap_child(self) -> tuple[int, int] | None:
        """Reap an ended child and kill its process group.

        Return the child's id and wait status, or None if no child has ended.
        """
        waitid, status = unpatched.waitid, None
        try:
            if waitid is None:
                pid, status = unpatched.waitpid(-1, os.WNOHANG)
            else:
                # Do not reap the child yet, so that its id is not used again.
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                ended = waitid(os.P_ALL, 0, flags)
                pid = 0 if ended is None else ended.si_pid
        except ChildProcessError:
            return None
        if not pid:
            return None
        kill_orphans_at = unpatched.monotonic() + _ORPHAN_DELAY_SECONDS
        self._kill_orphans_at = min(self._kill_orphans_at, kill_orphans_at)
        if pid in self._workers.values():
            with contextlib.suppress(OSError):  # the group has no other processes
                os.killpg(pid, signal.SIGKILL)
            # The worker's successor may need the ports that its orphans occupy, so do
            # not wait for the complete search.
            self._kill_orphans(_listed_children())
        if status is None:
            pid, status = unpatched.waitpid(pid, 0)
        return pid, status

    def _report(self, message: dict[str, Any]) -> None:
        # If the owner has exited, the next read from the socket detects this.
        with contextlib.suppress(OSError):
            self._owner.sendall(
                pack_message(MessageKind.FORK, payload=codec.encode(message))
            )


def thread_ids() -> set[object]:
    """Return the ids of all threads, on Linux including those of native libraries."""
    with contextlib.suppress(OSError):  # /proc may not be mounted, as in a chroot
        return {*os.listdir("/proc/self/task")}
    return {thread.ident for thread in threading.enumerate()}


def _raise_oom_score() -> None:
    """Make the kernel prefer to kill this process when memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # /proc may be read-only
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE_INCREASE)))


def _child_pids() -> list[int]:
    return [pid for pid, *_ in child_processes()]


def _listed_children() -> list[int]:
    """Return the children that the kernel lists, which may not be all of them.

    This is faster than a search of all processes. Some kernels do not provide the list.
    """
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [*map(int, path.read_bytes().split())]
    except OSError:
        return []


def kill_group(pid: int) -> None:
    """Kill a worker and all other processes of its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
