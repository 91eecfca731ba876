"""The process that workers are forked from.

It is single-threaded, so that forking it is safe, and does five things: import what
it is told to at the start, fork workers, kill workers and what they leave behind, pass
on what they write to stderr, and report how each ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import math
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from envserve.spaces import codec
from envserve.worker.channel import Kind, MessageDecoder, pack_message
from envserve.worker.orphans import children
from envserve.worker.stderr_pipes import StderrPipes

__all__ = ["kill_group", "main"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
#: Has a worker write its Python stack to stderr; an env may use it for something else.
_STACK_SIGNAL: Final = signal.SIGUSR2
#: How long it has for that before it is killed, and how long once it has begun.
_STACK_SECONDS: Final = 0.08
_STACK_REST_SECONDS: Final = 0.005
#: How long after a child's end it is looked for orphans: many may end at once.
_ORPHANS_SECONDS: Final = 0.1
#: How long it may take to end all that there is; our owner waits for a second.
_END_SECONDS: Final = 0.5
#: How much sooner than others, out of 1000, workers go when memory runs out.
_OOM_SCORE: Final = 500


def main(fd: int) -> None:
    """Runs the template process over its socket to the owner."""
    os.set_inheritable(fd, False)  # else a process that an env starts keeps us alive
    owner = socket.socket(fileno=fd)
    owner.settimeout(None)
    os.dup2(2, 1)  # what envs print must not mix with the owner's output
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # or who is killed has said nothing
    # Imported here: the owner of a launcher needs neither gymnasium nor a worker.
    from envserve.worker import process  # noqa: F401

    _Template(owner).run()


class _Template:
    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._wakeup, wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        self._reader = MessageDecoder()
        self._fds: list[int] = []
        self._import_error = ""
        self._workers: dict[int, int] = {}  # process id by request
        self._kill_at: dict[int, float] = {}  # of those that are writing their stack
        self._libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "linux":
            # Who leaves a worker's group, by setsid or two forks, becomes our child.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._helpers: set[int] = set()  # processes that imported modules have started
        self._orphans_at = math.inf
        self._poller = select.poll()
        self._poller.register(self._owner, select.POLLIN)
        self._poller.register(self._wakeup, select.POLLIN)
        self._pipes = StderrPipes(self._poller)

    def run(self) -> None:
        """Serves until the owner closes its end, or dies."""
        try:
            self._serve_until_closed()
        finally:
            # Workers that end from here on would write to sockets that are gone.
            signal.set_wakeup_fd(-1)
        for each in (self._owner, self._wakeup, self._wakeup_writer):
            each.close()

    def _serve_until_closed(self) -> None:
        while True:
            for fd, _ in self._poller.poll(self._kill_due()):
                worker = self._pipes.worker_of(fd)
                if worker in self._kill_at:
                    kill_at = time.monotonic() + _STACK_REST_SECONDS
                    self._kill_at[worker] = min(self._kill_at[worker], kill_at)
                if self._pipes.handle(fd):
                    continue
                if fd == self._wakeup.fileno():
                    self._reap()
                elif fd == self._owner.fileno() and not self._serve():
                    self._end_all()
                    self._pipes.close()
                    return

    def _end_all(self) -> None:
        """Kills all workers; on Linux also what they have started, which we adopt."""
        for pid in self._workers.values():
            kill_group(pid)
        give_up_at = time.monotonic() + _END_SECONDS
        while (left := _children()) and time.monotonic() < give_up_at:
            for pid in left:
                kill_group(pid)
            select.select([self._wakeup], [], [], 0.05)
            self._drop_wakeups()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _kill_orphans(self) -> None:
        """Kills what workers that have ended have left behind."""
        self._orphans_at = math.inf
        for pid in {*_children()} - self._helpers - {*self._workers.values()}:
            kill_group(pid)

    def _kill_due(self) -> int | None:
        """Kills who has had time for its stack, and orphans; returns ms to the next."""
        now = time.monotonic()
        if now >= self._orphans_at:
            self._kill_orphans()
        due = [request for request, at in self._kill_at.items() if at <= now]
        for request in due:
            del self._kill_at[request]
            if request in self._workers:
                kill_group(self._workers[request])
        next_at = min([*self._kill_at.values(), self._orphans_at])
        return None if next_at == math.inf else math.ceil(1000 * (next_at - now))

    def _kill(self, request: int, has_stack: bool) -> None:
        pid = self._workers.get(request)
        if pid is None:
            return
        if not has_stack:
            kill_group(pid)
        elif request not in self._kill_at:
            self._kill_at[request] = time.monotonic() + _STACK_SECONDS
            os.kill(pid, _STACK_SIGNAL)  # ours to reap still, so nobody else's

    def _serve(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._owner, 1 << 16, 64)
        except ConnectionError:
            return False
        self._fds += fds
        for received in self._reader.feed(data):
            message = codec.decode(received.payload)
            if "import" in message:
                self._import(message["import"], message["preload"])
                self._helpers = {*_children()}
            elif "kill" in message:
                self._kill(message["kill"], message["stack"])
            elif self._fds:
                self._fork(message["fork"], self._fds.pop(0))
            else:  # the kernel drops what a process has no room for
                error = "the template process has no descriptor left"
                self._report({"fork": message["fork"], "error": error})
        return bool(data)

    def _import(self, modules: list[str], env_names: list[str]) -> None:
        from envserve.envs import registry

        try:
            registry.import_env_modules(modules)
        except Exception as error:
            self._import_error = str(error)
        for env_name in env_names:
            # The worker meets the same error again, and reports it with its traceback.
            with contextlib.suppress(Exception):
                registry.preload(env_name)
        gc.collect()
        gc.freeze()  # forks then share these pages for good
        self._report({"imported": not self._import_error})

    def _fork(self, request: int, fd: int) -> None:
        # Nothing is imported here: other pools wait for their kills and forks.
        parent = os.getpid()
        stderr_fd = self._pipes.open(request)
        fds = [fd] if stderr_fd is None else [fd, stderr_fd]
        if sys.stdout is not None:
            sys.stdout.flush()  # or each fork says it once more
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            for each in fds:
                os.close(each)
            self._pipes.end(request)
            self._report({"fork": request, "error": str(error)})
            return
        if pid == 0:
            self._become_worker(parent, fd, stderr_fd)
        for each in fds:
            os.close(each)
        self._workers[request] = pid
        self._report({"fork": request, "pid": pid})

    def _become_worker(self, parent: int, fd: int, stderr_fd: int | None) -> None:
        from envserve.worker import process

        code = 1
        try:
            if sys.platform == "linux":
                # Else a worker that is woken takes the core from the process that has
                # the other workers' steps still to send. Not everybody may do this.
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setsid()  # its own group, which is killed as a whole
            if sys.platform == "linux":
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                # So that orphans come to the template when we have ended, not before.
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
                _be_first_to_go()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._owner, self._wakeup, self._wakeup_writer):
                other.close()
            for other_fd in self._fds:
                os.close(other_fd)
            self._pipes.forget()
            if stderr_fd is not None:
                os.dup2(stderr_fd, 1)
                os.dup2(stderr_fd, 2)
                os.close(stderr_fd)
            # So that a crash in C says where in Python it was called from.
            faulthandler.enable(2, all_threads=False)
            faulthandler.register(_STACK_SIGNAL, 2, all_threads=False)
            os.set_inheritable(fd, False)
            channel = socket.socket(fileno=fd)
            channel.settimeout(None)  # whatever an imported module's default is
            process.run(channel, self._import_error)
            code = 0
        except BaseException:
            # Nothing above this frame may run in the child: it is the template's.
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _drop_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _reap(self) -> None:
        self._drop_wakeups()
        while True:
            # Seen, but not yet reaped: until then its group cannot be another's.
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            orphans_at = time.monotonic() + _ORPHANS_SECONDS
            self._orphans_at = min(self._orphans_at, orphans_at)
            is_worker = ended.si_pid in self._workers.values()
            if is_worker:
                kill_group(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            if not is_worker:  # an orphan, or what an imported module has started
                continue
            (request,) = [k for k, v in self._workers.items() if v == pid]
            del self._workers[request]
            code = os.waitstatus_to_exitcode(status)
            tail = self._pipes.end(request, is_reported=code != 0)
            self._report({"pid": pid, "exit": code, "stderr": tail})

    def _report(self, message: dict[str, Any]) -> None:
        # A closed owner is noticed by the next read.
        with contextlib.suppress(OSError):
            self._owner.sendall(pack_message(Kind.FORK, payload=codec.encode(message)))


def _be_first_to_go() -> None:
    """Has the kernel end this process before others when memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # a /proc that is not to be written to
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))


def _children() -> list[int]:
    return [pid for pid, *_ in children()]


def kill_group(pid: int) -> None:
    """Kills a worker and whatever processes its envs have started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
