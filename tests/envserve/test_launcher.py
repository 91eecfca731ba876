"""A template process forks the workers, which leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.support.processes import is_running
from envserve.errors import WorkerError
from envserve.pool.launcher import Launcher
from envserve.pool.worker_states import Exit
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.worker import process, template
from envserve.worker.channel import MessageKind, pack_message

from .conftest import WaitUntil
from .limits import limit_for_descriptors, resource_limit
from .pool_driver import kill


class RequestedWorker:
    """A worker requested from a launcher, and the launcher's reports about it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.process = launcher.launch()
        self.socket = self.process.channel.socket

    @property
    def pids(self) -> list[int]:
        return [] if self.process.pid is None else [self.process.pid]

    @property
    def exits(self) -> list[Exit]:
        return [] if self.process.exit is None else [self.process.exit]

    def wait_for_start(self) -> RequestedWorker:
        self.wait_for(lambda: self.pids)
        return self

    def wait_for_end(self) -> Exit:
        self.wait_for(lambda: self.exits)
        return self.exits[0]

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 40.0
        self._launcher.poll()
        while not condition():
            assert time.monotonic() < deadline
            self._launcher.wait(40.0)
            self._launcher.poll()

    def assert_closed(self) -> None:
        """Assert that the worker's end of the socket is closed, or soon will be."""
        self.socket.settimeout(20.0)
        assert self.socket.recv(1) == b""

    def close(self) -> None:
        self.socket.close()


def template_pid(launcher: Launcher) -> int:
    return launcher._process.pid


Make = Callable[..., Launcher]
Start = Callable[..., RequestedWorker]


@pytest.fixture
def make_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes launchers that import modules with given source."""
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.ExitStack() as stack:

        def make(
            preload: Sequence[str] | None = (),
            *,
            lists_names: bool = False,
            **modules: str,
        ) -> Launcher:
            for name, text in modules.items():
                (tmp_path / f"{name}.py").write_text(text)
            launcher = Launcher(modules, preload, lists_names=lists_names)
            return stack.enter_context(contextlib.closing(launcher))

        yield make


@pytest.fixture
def launcher(make_launcher: Make) -> Launcher:
    return make_launcher()


@pytest.fixture
def start(make_launcher: Make) -> Iterator[Start]:
    """Return a function that requests workers, which exit after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda launcher: stack.enter_context(
            contextlib.closing(RequestedWorker(launcher))
        )


STACK = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
OURS = f'  File "{process.__file__}", line 1 in run\n'
FATAL = "Fatal Python error: Aborted\n\n"


@pytest.mark.parametrize(
    ("code", "tail", "stderr_summary", "excerpt"),
    [
        (3, "", "", ""),
        (3, "a\n\x1b[1m\tb\n\n", "\\x1b[1m\\tb", "a\n\\x1b[1m\\tb"),
        (-9, "a\nb", "b", ""),
        (0, "a\nb", "b", ""),
        (
            *(-6, f"a\n{FATAL}{STACK}\nExtension modules: x"),
            'Fatal Python error: Aborted: File "a.py", line 1 in f',
            f"{FATAL.strip()}\n{STACK}Extension modules: x",
        ),
        (
            *(-9, f"a\n{STACK}"),
            'Stack (most recent call first): File "a.py", line 1 in f',
            STACK.strip(),
        ),
        (
            *(-6, f"{FATAL}{STACK}{OURS}{OURS}Extension modules: x"),
            'Fatal Python error: Aborted: File "a.py", line 1 in f',
            f"{FATAL.strip()}\n{STACK.strip()}",
        ),
        (3, "x\n" * 50, "x", "x\n" * 9 + "x"),
        (3, "x" * 500, "x" * 500, "x" * 200),
    ],
)
def test_stderr_is_summarised(
    code: int, tail: str, stderr_summary: str, excerpt: str
) -> None:
    end = Exit(1, code, stderr_tail=tail)
    assert end.stderr_summary == stderr_summary
    assert end.stderr_excerpt == excerpt


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(1, 0), "exited with code 0"),
        (Exit(1, 3), "exited with code 3"),
        (Exit(1, -9), "was killed by SIGKILL"),
        (Exit(1, -11), "was killed by SIGSEGV"),
        (Exit(1, -250), "was killed by signal 250"),
        (Exit(0, 1, "out of memory"), "could not be started: out of memory"),
    ],
)
def test_exit_has_a_readable_description(end: Exit, text: str) -> None:
    assert str(end) == text


def test_start_and_end_of_workers_are_reported_once(
    launcher: Launcher, start: Start
) -> None:
    workers = [start(launcher) for _ in range(3)]
    for worker in workers:
        assert worker.wait_for_start().exits == []
    assert len({worker.pids[0] for worker in workers}) == 3
    launcher.kill(workers[1].process)
    workers[1].wait_for_end()
    workers[0].close()  # makes the worker exit
    assert workers[0].wait_for_end() == Exit(workers[0].pids[0], 0)
    assert workers[1].exits == [Exit(workers[1].pids[0], -9)]
    workers[1].assert_closed()
    assert workers[2].exits == []
    launcher.kill(workers[1].process)  # does nothing, because it has already exited
    assert repr(launcher).endswith("1 workers>")


def test_template_outlives_a_child_that_an_imported_module_has_started(
    make_launcher: Make, start: Start
) -> None:
    text = "import subprocess; child = subprocess.Popen(['true'])"
    launcher = make_launcher(starts_a_child=text)
    for _ in range(3):
        worker = start(launcher)
        launcher.kill(worker.process)
        worker.wait_for_end()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not adopt")
def test_a_process_left_behind_is_killed_before_the_exit_of_its_worker_is_reported(
    make_launcher: Make, start: Start, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The worker's successor may need the same port or device."""
    lines = (
        f"path = {str(tmp_path / 'pid')!r}",
        "def leave():",
        "    left = subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "    with open(path + '.part', 'w') as file: file.write(str(left.pid))",
        "    os.rename(file.name, path)",
        "os.register_at_fork(after_in_child=leave)",
    )
    launcher = make_launcher(leaves="\n".join(["import os, subprocess", *lines]))
    worker = start(launcher).wait_for_start()
    wait_until((tmp_path / "pid").exists)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    wait_until(lambda: "S (sleeping)" in status.read_text())
    kill(worker.pids[0])
    worker.wait_for_end()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        is_killed = pending >> (signal.SIGKILL - 1) & 1
        assert is_killed or "S (sleeping)" not in fields["State"]


def test_end_of_the_template_ends_its_workers_and_is_reported_for_each(
    launcher: Launcher, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [start(launcher).wait_for_start() for _ in range(2)]
    kill(template_pid(launcher))
    for worker in workers:
        assert worker.wait_for_end() == Exit(worker.pids[0], -9)
        worker.assert_closed()
    assert "was killed by SIGKILL" in repr(launcher)
    assert ") was killed by SIGKILL, and 2 workers with it; " in caplog.text
    launcher.kill(workers[0].process)
    start(launcher).wait_for_start()


def test_sigchld_after_the_template_has_closed_prints_nothing() -> None:
    code = """
import os, signal, socket
from envserve.worker import template

owner, fd = socket.socketpair()
owner.close()
template.main(fd.detach())
os.kill(os.getpid(), signal.SIGCHLD)
"""
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],  # warns about unclosed sockets
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_template_that_cannot_run_is_reported_as_a_failed_start(
    make_launcher: Make, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    end = start(make_launcher()).wait_for_end()
    assert str(end) == ("could not be started: the template process exited with code 1")


@pytest.mark.parametrize("has_user", [False, True])
def test_an_interpreter_that_workers_cannot_run_is_a_worker_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_user: bool
) -> None:
    if has_user and os.geteuid() != 0:
        pytest.skip("only root starts others' processes")
    (tmp_path / "python").touch(0o600)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    host = HostSettings(worker_user="nobody") if has_user else None
    with pytest.raises(WorkerError, match="Permission denied") as raised:
        Launcher(host=host)
    assert str(raised.value).endswith("; let the user of --worker-user run it") == (
        has_user
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by prlimit")
def test_template_without_free_descriptors_reports_that_and_survives(
    launcher: Launcher, start: Start
) -> None:
    first = start(launcher).wait_for_start()
    template = template_pid(launcher)
    limit = limit_for_descriptors(template, 0)
    with resource_limit(template, resource.RLIMIT_NOFILE, limit):
        for _ in range(2):
            assert "no descriptors left" in str(start(launcher).wait_for_end())
    start(launcher).wait_for_start()
    assert first.exits == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by prlimit")
@pytest.mark.parametrize("num_free", [0, 1, 3])
def test_lack_of_descriptors_is_a_worker_error(
    launcher: Launcher, num_free: int
) -> None:
    limit = limit_for_descriptors(os.getpid(), num_free)
    # The open file replaces the descriptor with which the others were listed.
    with resource_limit(os.getpid(), resource.RLIMIT_NOFILE, limit), open(os.devnull):
        with pytest.raises(WorkerError, match="Too many open files"):
            Launcher()
        if num_free < 2:
            with pytest.raises(WorkerError, match="Too many open files"):
                launcher.launch()


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by prlimit")
def test_the_template_is_replaced_with_reserved_descriptors(start: Start) -> None:
    with contextlib.closing(Launcher(num_reserved=16)) as launcher:
        first = start(launcher).wait_for_start()
        kill(template_pid(launcher))
        first.wait_for_end()
        limit = limit_for_descriptors(os.getpid(), 0)
        with resource_limit(os.getpid(), resource.RLIMIT_NOFILE, limit):
            with open(os.devnull), pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            with open(os.devnull):
                start(launcher).wait_for_start()


@contextlib.contextmanager
def stopped_template(launcher: Launcher) -> Iterator[None]:
    """Stop the template, so that its socket's small buffer fills up."""
    launcher._channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    os.kill(template_pid(launcher), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(template_pid(launcher), signal.SIGCONT)


def test_launching_and_killing_do_not_wait_for_a_stopped_template(
    launcher: Launcher, start: Start
) -> None:
    start(launcher).wait_for_start()
    with stopped_template(launcher):
        workers = [start(launcher) for _ in range(20)]
        launcher.kill(workers[-1].process)
        assert 0 < len(launcher._channel.unsent) < 21
        unsent = len(launcher._channel.unsent)
        launcher.kill(workers[-1].process)
        assert len(launcher._channel.unsent) == unsent
    workers[-1].wait_for_end()
    assert all(len(worker.pids) == 1 for worker in workers)
    assert [len(worker.exits) for worker in workers] == [0] * 19 + [1]


@pytest.mark.skipif(sys.platform != "linux", reason="detected by waitid")
@pytest.mark.parametrize("request_kind", ["fork", "kill"])
def test_stopped_template_is_replaced_when_a_request_is_pending(
    launcher: Launcher, start: Start, request_kind: str
) -> None:
    first = start(launcher).wait_for_start()
    os.kill(template_pid(launcher), signal.SIGSTOP)
    if request_kind == "fork":
        end = start(launcher).wait_for_end()
        assert "was suspended by a signal, and was killed by SIGKILL" in str(end)
    else:
        launcher.kill(first.process)
    assert first.wait_for_end().exit_code == -signal.SIGKILL
    first.assert_closed()
    start(launcher).wait_for_start()


#: Code of a process that owns a template and a worker.
OWNER = """
import os, signal, sys
from envserve.pool.launcher import Launcher

launcher = Launcher()
worker = launcher.launch()
while worker.pid is None:
    launcher.wait(10.0)
    launcher.poll()
template = launcher._process.pid
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG")
def test_stopped_template_and_its_workers_end_with_a_killed_owner(
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    code = (
        OWNER
        + """
os.kill(template, signal.SIGSTOP)
print(template, worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL
    pids = [*map(int, result.stdout.split())]
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG")
def test_template_ends_with_its_owner_although_a_forked_child_keeps_the_socket(
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    code = (
        OWNER
        + """
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(template, worker.pid, flush=True)
os.close(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,  # the child exits at its end of file
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pids = [*map(int, owner.stdout.readline().split())]
        assert len(pids) == 2
        wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG")
def test_a_template_that_imports_ends_with_a_killed_owner(
    wait_until: WaitUntil, tmp_path: Path
) -> None:
    code = """
import os, signal, subprocess, sys, time
from envserve.pool.launcher import Launcher

launcher = Launcher([sys.argv[1]])
while not os.path.exists("started"):
    time.sleep(0.01)
print(launcher._process.pid, open("started").read(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "hangs.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('new', 'w').write(str(child.pid))\n"
        "os.rename('new', 'started')\n"
        "time.sleep(600)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hangs.py")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=100,
        check=False,
    )
    pids = [*map(int, result.stdout.split())]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG")
def test_template_outlives_the_thread_that_has_started_it(
    make_launcher: Make, start: Start
) -> None:
    made: list[Launcher] = []
    thread = threading.Thread(target=lambda: made.append(make_launcher()))
    thread.start()
    thread.join()
    template = template_pid(made[0])
    start(made[0]).wait_for_start()
    assert template_pid(made[0]) == template


@pytest.mark.parametrize("end", ["close", "death"])
def test_queued_forks_are_limited_and_end_with_the_template(
    launcher: Launcher, start: Start, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("envserve.pool.launcher._MAX_UNSENT", 2)
    workers = []

    def start_too_many() -> None:
        for _ in range(20):
            workers.append(start(launcher))

    with (
        stopped_template(launcher),
        pytest.raises(WorkerError, match="fewer than 2 queued messages"),
    ):
        start_too_many()
    launcher.close() if end == "close" else kill(template_pid(launcher))
    for worker in workers:
        worker.wait_for_end()
        worker.assert_closed()  # even for requests that were never sent


def test_template_that_does_not_fork_in_time_is_replaced(
    tmp_path: Path, make_launcher: Make, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "has run"
    sleeps_once = (
        f"import os, time; mark = {str(mark)!r}\n"
        "if not os.path.exists(mark): open(mark, 'w').close(); time.sleep(60)"
    )
    frozen, extra_seconds = time.monotonic(), 0.0
    launcher = make_launcher(sleeps_once=sleeps_once)
    monkeypatch.setattr(launcher, "_clock", lambda: frozen + extra_seconds)
    worker = start(launcher)
    while not mark.exists():
        launcher.poll()
    launcher.poll()  # the report that the import has begun
    extra_seconds = 110.0
    launcher.poll()
    assert worker.exits == []
    extra_seconds = 121.0
    launcher.poll()
    (end,) = worker.exits
    assert "longer than 120 s to fork a worker" in str(end)
    assert "sleeps_once" in str(end)
    assert str(end).endswith("was killed by SIGKILL")
    start(launcher).wait_for_start()


def test_template_whose_socket_an_import_has_closed_is_killed(
    make_launcher: Make, start: Start
) -> None:
    text = "import os, time; os.closerange(3, 4096); time.sleep(60)"
    end = start(make_launcher(closes_all=text)).wait_for_end()
    assert "the template process was killed by SIGKILL" in str(end)


def test_unread_reports_do_not_make_the_template_look_stuck(
    launcher: Launcher, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_template(launcher):
        workers = [start(launcher) for _ in range(20)]
    assert select.select([launcher._channel.socket], [], [], 20.0)[0]
    monkeypatch.setattr(launcher, "_clock", lambda: time.monotonic() + 1000.0)
    for worker in workers:  # until now, most of these requests were not even sent
        assert worker.wait_for_start().exits == []


def test_modules_of_named_envs_are_imported_once_and_before_the_first_fork(
    tmp_path: Path, make_launcher: Make, start: Start
) -> None:
    log = tmp_path / "log"
    (tmp_path / "named_envs.py").write_text(
        f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    )
    launcher = make_launcher(
        ["NoSuchEnv-v0", "Named-v0"],
        offers="import gymnasium; gymnasium.register('Named-v0', 'named_envs:Env')",
    )
    start(launcher).wait_for_start()
    assert log.read_text() == f"{template_pid(launcher)} "


TAKES_OVER = {
    "ignores SIGCHLD": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "has the default action for SIGCHLD": (
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)"
    ),
    "uses the wakeup descriptor": (
        "A, B = socket.socketpair(); A.setblocking(False)\n"
        "signal.set_wakeup_fd(A.fileno())"
    ),
    "removes the wakeup descriptor": "signal.set_wakeup_fd(-1)",
    "blocks all signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    ),
    "closes the standard streams": "[os.close(fd) for fd in range(3)]",
    "closes sys.stdout": "sys.stdout.close()",
    "replaces sys.stdout": "sys.stdout = object()",
    "leaves stderr in a closed pipe": (
        "r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r); os.close(w)\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"
    ),
    "leaves an alarm": (
        "signal.alarm(1000)\n"
        "def check():\n"
        "    if signal.alarm(0): os._exit(1)\n"
        "os.register_at_fork(before=check)"
    ),
    "leaves a profiling timer": (
        "signal.setitimer(signal.ITIMER_PROF, 1000)\n"
        "def check():\n"
        "    if any(signal.getitimer(signal.ITIMER_PROF)): os._exit(1)\n"
        "os.register_at_fork(before=check)"
    ),
    "leaves a watchdog": (
        "import faulthandler\n"
        "faulthandler.dump_traceback_later(1000, exit=True)\n"
        "def check():\n"
        "    if len(os.listdir('/proc/self/task')) > 1: os._exit(1)\n"
        "if sys.platform == 'linux': os.register_at_fork(before=check)"
    ),
    "makes stderr non-blocking": "os.set_blocking(2, False)",
}


@pytest.mark.parametrize("text", TAKES_OVER.values(), ids=TAKES_OVER)
def test_template_restores_the_process_state_that_an_import_has_changed(
    make_launcher: Make, start: Start, text: str
) -> None:
    code = f"import os, signal, socket, sys\n{text}"
    launcher = make_launcher(takes_over=code)
    first = start(launcher).wait_for_start()
    kill(first.pids[0])
    assert first.wait_for_end().exit_code == -signal.SIGKILL
    second = start(launcher).wait_for_start()
    second.close()
    assert second.wait_for_end().exit_code == 0
    assert os.get_blocking(2)  # the template shares stderr with this process


def test_template_kills_hanging_workers_although_an_import_has_stopped_the_clocks(
    make_launcher: Make, start: Start
) -> None:
    launcher = make_launcher(
        stops="import signal, time\n"
        "time.monotonic = lambda: 0.0\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)"  # until workers handle it
    )
    worker = start(launcher).wait_for_start()
    launcher.kill(worker.process, wants_stack=True)
    assert worker.wait_for_end().exit_code == -signal.SIGKILL


def test_template_reaps_workers_if_its_owner_blocks_signals(
    make_launcher: Make, start: Start
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        worker = start(make_launcher()).wait_for_start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    kill(worker.pids[0])
    assert worker.wait_for_end().exit_code == -signal.SIGKILL


def test_threads_of_an_import_are_recorded(make_launcher: Make, start: Start) -> None:
    launcher = make_launcher(
        plain="import gymnasium",
        pool="from concurrent.futures import ThreadPoolExecutor\n"
        "POOL = ThreadPoolExecutor(1); POOL.submit(int).result()",
        many="import threading\n"
        "for _ in range(2): threading.Thread(target=threading.Event().wait).start()",
    )
    start(launcher).wait_for_start()
    assert launcher.import_note.startswith(
        "importing many, pool started 3 threads, which forked workers do not have; "
    )
    assert "preload=False (--no-preload)" in launcher.import_note


def test_a_server_logs_which_envs_its_workers_cannot_create(
    make_launcher: Make, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["Missing-v0", "CartPole-v1"]
    launcher = make_launcher(
        names,
        lists_names=True,
        registers="import gymnasium\n"
        "gymnasium.register('Missing-v0', 'no_such_package:Env')",
    )
    while (offered := launcher.wait_names(40.0)) is None:
        pass
    assert offered == tuple(sorted(names))
    assert launcher.has_imported
    (message,) = caplog.messages
    assert message.startswith("workers cannot create Missing-v0: expected a module")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in message


def test_threads_are_found_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", fails)
    assert threading.get_ident() in template.thread_ids()


def test_import_without_threads_records_none(make_launcher: Make, start: Start) -> None:
    launcher = make_launcher(
        ends="import os, threading\n"
        "thread = threading.Thread(target=int); thread.start(); thread.join()\n"
        "while os.path.exists(f'/proc/self/task/{thread.native_id}'): pass"
    )
    start(launcher).wait_for_start()
    assert launcher.has_imported
    assert launcher.import_note == ""


def test_workers_import_the_modules_themselves_if_they_are_not_preloaded(
    tmp_path: Path, make_launcher: Make, start: Start
) -> None:
    log = tmp_path / "log"
    text = f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    launcher = make_launcher(None, logs=text)
    workers = [start(launcher).wait_for_start() for _ in range(2)]
    for worker in workers:
        # They read the first message before they import, because it names their GPU.
        build = pack_message(MessageKind.BUILD, payload=codec.encode({}))
        worker.process.channel.send(build)
        assert worker.wait_for_end().exit_code == 0
        worker.close()
    assert sorted(log.read_text().split()) == sorted(
        str(worker.pids[0]) for worker in workers
    )


def test_template_with_threads_of_an_import_exits_with_its_owner(
    make_launcher: Make, start: Start
) -> None:
    text = "import threading; threading.Thread(target=threading.Event().wait).start()"
    launcher = make_launcher(waits_forever=text)
    start(launcher).wait_for_start()
    launcher.close()
    assert not is_running(template_pid(launcher))


def test_worker_runs_where_changing_its_scheduling_is_not_permitted(
    make_launcher: Make, start: Start
) -> None:
    refuses = (
        "import os\n"
        "def refuse(*_): raise PermissionError(1, 'Operation not permitted')\n"
        "os.sched_setscheduler = refuse"
    )
    worker = start(make_launcher(refuses=refuses)).wait_for_start()
    worker.close()
    assert str(worker.wait_for_end()) == "exited with code 0"


def test_closing_is_final_and_may_be_repeated(launcher: Launcher, start: Start) -> None:
    worker = start(launcher).wait_for_start()
    launcher.close()
    launcher.close()
    assert len(worker.exits) == 1
    launcher.poll()
    launcher.kill(worker.process)
    with pytest.raises(WorkerError, match="expected an open launcher"):
        start(launcher)


def test_closing_does_not_wait_for_an_import_that_hangs(make_launcher: Make) -> None:
    launcher = make_launcher(sleeps="import time; time.sleep(60)")
    began = time.monotonic()
    launcher.close()
    assert time.monotonic() - began < 20.0
    assert launcher._process.returncode == -signal.SIGKILL


_OWNER = """
import fcntl, os, sys, termios
import gymnasium
from envserve.client import BatchEnv

class Reads(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        try:
            read = open("/dev/tty").readline()
        except OSError:
            read = ""
        return self.observation_space.low, float(bool(read)), False, False, {}

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.close(os.open("/dev/tty", os.O_RDONLY))
    with BatchEnv.local(Reads, 1, step_timeout=5.0) as batch:
        batch.reset()
        result = batch.step([0])
        (pid,) = batch.lanes[0].worker_pids
        print(os.getsid(pid) == os.getsid(0), os.getpgid(pid) == pid)
        print(result.reward, result.status, result.infos)
"""


def test_workers_are_in_the_owners_session_but_have_no_terminal(tmp_path: Path) -> None:
    # Linux schedules each session as a group, and a worker that polls yields its core
    # only within its group. Reading from a terminal would stop a background process.
    (tmp_path / "owner.py").write_text(_OWNER)
    terminal, owners_end = os.openpty()
    try:
        owner = subprocess.run(
            [sys.executable, "owner.py"],
            cwd=tmp_path,
            stdin=owners_end,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            timeout=60.0,
        )
    finally:
        os.close(owners_end)
        os.close(terminal)
    assert owner.stdout == "True True\n[0.] [0] {}\n"
