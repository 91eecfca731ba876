"""Workers are forked by a template process, and leave nothing behind."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envserve.errors import WorkerError
from envserve.pool.launcher import Exit, Launcher

from .limits import limited, room_for_descriptors
from .pool_driver import kill


class Started:
    """A worker that a launcher was asked for, and what was heard of it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.forked, self.socket = launcher.launch()

    @property
    def pids(self) -> list[int]:
        return [] if self.forked.pid is None else [self.forked.pid]

    @property
    def exits(self) -> list[Exit]:
        return [] if self.forked.exit is None else [self.forked.exit]

    def wait_for(self, condition: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + 20.0
        self._launcher.poll()
        while not condition():
            assert time.monotonic() < give_up_at
            self._launcher.wait(20.0)
            self._launcher.poll()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


STACK = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
FATAL = "Fatal Python error: Aborted\n\n"


@pytest.mark.parametrize(
    ("code", "tail", "last_words", "excerpt"),
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
        (3, "x\n" * 50, "x", "x\n" * 9 + "x"),
        (3, "x" * 500, "x" * 500, "x" * 200),
    ],
)
def test_end_of_stderr_tells_why(
    code: int, tail: str, last_words: str, excerpt: str
) -> None:
    end = Exit(1, code, stderr_tail=tail)
    assert end.last_words == last_words
    assert end.excerpt == excerpt


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
def test_end_is_said_in_words(end: Exit, text: str) -> None:
    assert str(end) == text


def test_start_and_end_of_each_worker_are_reported_once(launcher: Launcher) -> None:
    workers = [Started(launcher) for _ in range(3)]
    for worker in workers:
        worker.wait_for(lambda: worker.pids)  # noqa: B023
        assert worker.exits == []
    assert len({worker.pids[0] for worker in workers}) == 3
    launcher.kill(workers[1].forked)
    workers[1].wait_for(lambda: workers[1].exits)
    workers[0].socket.close()  # a worker whose pool is gone ends by itself
    workers[0].wait_for(lambda: workers[0].exits)
    assert workers[0].exits == [Exit(workers[0].pids[0], 0)]
    assert workers[1].exits == [Exit(workers[1].pids[0], -9)]
    assert workers[1].socket.recv(1) == b""
    assert workers[2].exits == []
    launcher.kill(workers[1].forked)  # that one is no more: nobody is hit
    assert repr(launcher).endswith("1 workers>")
    for worker in workers:
        worker.socket.close()


def test_template_outlives_a_child_that_an_imported_module_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_child.py").write_text(
        "import subprocess; child = subprocess.Popen(['true'])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher(["starts_a_child"])
    try:
        for _ in range(3):
            worker = Started(launcher)
            launcher.kill(worker.forked)
            worker.wait_for(lambda: worker.exits)  # noqa: B023
            worker.socket.close()
    finally:
        launcher.close()


def test_end_of_the_template_ends_its_workers_and_is_reported_for_each(
    launcher: Launcher,
) -> None:
    workers = [Started(launcher) for _ in range(2)]
    for worker in workers:
        worker.wait_for(lambda: worker.pids)  # noqa: B023
    kill(launcher._process.pid)
    for worker in workers:
        worker.wait_for(lambda: worker.exits)  # noqa: B023
        assert worker.exits == [Exit(worker.pids[0], -9)]
        worker.socket.settimeout(2.0)
        assert worker.socket.recv(1) == b""
        worker.socket.close()
    assert "was killed by SIGKILL" in repr(launcher)
    launcher.kill(workers[0].forked)
    again = Started(launcher)
    again.wait_for(lambda: again.pids)
    again.socket.close()


def test_worker_that_ends_after_its_template_has_closed_leaves_no_complaint() -> None:
    code = """
import os, signal, socket
from envserve.worker import template

owner, fd = socket.socketpair()
owner.close()
template.main(fd.detach())
os.kill(os.getpid(), signal.SIGCHLD)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_template_that_cannot_run_is_reported_as_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    launcher = Launcher()
    worker = Started(launcher)
    worker.wait_for(lambda: worker.exits)
    (end,) = worker.exits
    text = "could not be started: the template process exited with code 1"
    assert str(end) == text
    worker.socket.close()
    launcher.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by prlimit")
def test_template_without_room_for_a_workers_socket_says_so_and_lives_on(
    launcher: Launcher,
) -> None:
    first = Started(launcher)
    first.wait_for(lambda: first.pids)
    template = launcher._process.pid
    limit = room_for_descriptors(template, 0)
    with limited(template, resource.RLIMIT_NOFILE, limit):
        for _ in range(2):
            refused = Started(launcher)
            refused.wait_for(lambda: refused.exits)  # noqa: B023
            assert "no descriptor left" in str(refused.exits[0])
            refused.socket.close()
    last = Started(launcher)
    last.wait_for(lambda: last.pids)
    assert first.exits == []
    first.socket.close()
    last.socket.close()


def test_lack_of_descriptors_is_an_error_of_ours(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(WorkerError, match="Too many open files"):
        Started(launcher)


def test_nobody_waits_for_a_template_that_does_not_read(launcher: Launcher) -> None:
    started = Started(launcher)
    started.wait_for(lambda: started.pids)
    template = launcher._process.pid
    launcher._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    os.kill(template, signal.SIGSTOP)
    try:
        workers = [Started(launcher) for _ in range(20)]
        launcher.kill(workers[-1].forked)
        assert 0 < len(launcher._outbox) < 21
        unsent = len(launcher._outbox)
        launcher.kill(workers[-1].forked)
        assert len(launcher._outbox) == unsent
    finally:
        os.kill(template, signal.SIGCONT)
    workers[-1].wait_for(lambda: workers[-1].exits)
    assert all(len(worker.pids) == 1 for worker in workers)
    assert [len(worker.exits) for worker in workers] == [0] * 19 + [1]
    for worker in [started, *workers]:
        worker.socket.close()


@pytest.mark.parametrize("end", ["close", "death"])
def test_forks_that_wait_for_the_template_are_bounded_and_end_with_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("envserve.pool.launcher._MAX_UNSENT", 2)
    launcher._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    template = launcher._process.pid
    os.kill(template, signal.SIGSTOP)
    workers = []

    def start_too_many() -> None:
        for _ in range(20):
            workers.append(Started(launcher))

    try:
        with pytest.raises(WorkerError, match="less than 2 messages that wait"):
            start_too_many()
    finally:
        os.kill(template, signal.SIGCONT)
    launcher.close() if end == "close" else kill(template)
    for worker in workers:
        worker.wait_for(lambda: worker.exits)  # noqa: B023
        worker.socket.settimeout(2.0)
        assert worker.socket.recv(1) == b""  # also of those that were never sent
        worker.socket.close()


def test_template_that_does_not_fork_in_time_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "has run"
    (tmp_path / "sleeps_once.py").write_text(
        f"import os, time; mark = {str(mark)!r}\n"
        "if not os.path.exists(mark): open(mark, 'w').close(); time.sleep(60)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seconds_gone = 0.0
    launcher = Launcher(["sleeps_once"], clock=lambda: time.monotonic() + seconds_gone)
    try:
        worker = Started(launcher)
        while not mark.exists():
            launcher.poll()
        seconds_gone = 110.0
        launcher.poll()
        assert worker.exits == []
        seconds_gone = 121.0
        launcher.poll()
        (end,) = worker.exits
        assert "longer than 120 s to fork a worker" in str(end)
        assert "sleeps_once" in str(end)
        assert str(end).endswith("was killed by SIGKILL")
        again = Started(launcher)
        again.wait_for(lambda: again.pids)
        for started in (worker, again):
            started.socket.close()
    finally:
        launcher.close()


def test_template_whose_socket_an_import_has_closed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closes_all.py").write_text(
        "import os, time; os.closerange(3, 4096); time.sleep(60)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher(["closes_all"])
    worker = Started(launcher)
    worker.wait_for(lambda: worker.exits)
    assert str(worker.exits[0]).endswith("the template process was killed by SIGKILL")
    worker.socket.close()
    launcher.close()


def test_reports_that_nobody_has_read_for_long_are_no_sign_of_a_stuck_template(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    os.kill(launcher._process.pid, signal.SIGSTOP)
    workers = [Started(launcher) for _ in range(20)]
    os.kill(launcher._process.pid, signal.SIGCONT)
    assert select.select([launcher._socket], [], [], 20.0)[0]
    monkeypatch.setattr(launcher, "_clock", lambda: time.monotonic() + 1000.0)
    for worker in workers:  # most of which have not even been sent
        worker.wait_for(lambda: worker.pids or worker.exits)  # noqa: B023
        assert worker.exits == []
        worker.socket.close()


def test_modules_of_named_envs_are_imported_once_and_before_the_first_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    (tmp_path / "named_envs.py").write_text(
        f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}} ')"
    )
    (tmp_path / "offers_named_envs.py").write_text(
        "import gymnasium; gymnasium.register('Named-v0', 'named_envs:Env')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher(["offers_named_envs"], ["NoSuchEnv-v0", "Named-v0"])
    try:
        worker = Started(launcher)
        worker.wait_for(lambda: worker.pids)
        assert log.read_text() == f"{launcher._process.pid} "
        worker.socket.close()
    finally:
        launcher.close()


def test_worker_runs_where_its_scheduling_must_not_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuses.py").write_text(
        "import os\n"
        "def refuse(*_): raise PermissionError(1, 'Operation not permitted')\n"
        "os.sched_setscheduler = refuse"
    )
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher(["refuses"])
    try:
        worker = Started(launcher)
        worker.wait_for(lambda: worker.pids)
        worker.socket.close()
        worker.wait_for(lambda: worker.exits)
        assert str(worker.exits[0]) == "exited with code 0"
    finally:
        launcher.close()


def test_closing_is_final_and_may_be_repeated(launcher: Launcher) -> None:
    worker = Started(launcher)
    worker.wait_for(lambda: worker.pids)
    launcher.close()
    launcher.close()
    assert len(worker.exits) == 1
    launcher.poll()
    launcher.kill(worker.forked)
    with pytest.raises(WorkerError, match="expected a launcher that is open"):
        Started(launcher)
    worker.socket.close()


def test_closing_does_not_wait_for_an_import_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher(["sleeps"])
    began = time.monotonic()
    launcher.close()
    assert time.monotonic() - began < 2.0
    assert launcher._process.returncode == -signal.SIGKILL
