"""Workers' stderr is forwarded, and workers never wait for its reader."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envserve.worker.stderr_pipes import TAIL_BYTES, StderrPipes

from .pool_driver import ODD_ENVS, SCRIPT, PoolMaker, step


class Pipes(StderrPipes):
    """Pipes that forward to a pipe of this test, whose read end is `out`."""

    def __init__(self) -> None:
        self.out, self.write_fd = os.pipe()
        os.set_blocking(self.out, False)
        self.poller = select.poll()
        self.now = 0.0
        super().__init__(self.poller, self.write_fd, lambda: self.now)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    for fd in (pipes.out, pipes.write_fd):
        os.close(fd)


def test_worker_closes_the_descriptors_of_the_template() -> None:
    before = {*os.listdir("/dev/fd")}
    pipes = Pipes()
    os.close(open_for(pipes, 1))
    pipes.close_in_worker()
    for fd in (pipes.out, pipes.write_fd):
        os.close(fd)
    assert {*os.listdir("/dev/fd")} <= before


def open_for(pipes: StderrPipes, worker: int) -> int:
    fd = pipes.open(worker)
    assert fd is not None
    return fd


def handle_all(pipes: StderrPipes, poller: select.poll) -> None:
    while events := poller.poll(0):
        for fd, _ in events:
            assert pipes.handle(fd)


def read_all(fd: int) -> bytes:
    data = b""
    try:
        while more := os.read(fd, 1 << 20):
            data += more
    except BlockingIOError:
        pass
    return data


def test_bytes_are_forwarded_and_the_last_are_kept_per_worker(pipes: Pipes) -> None:
    writers = {worker: open_for(pipes, worker) for worker in (7, 8)}
    texts = {7: b"\xff\x00rubbish \xed\xa0\x80\n", 8: b"x" * 5000 + b"end\n"}
    for worker, fd in writers.items():
        os.write(fd, texts[worker])
        handle_all(pipes, pipes.poller)
        assert read_all(pipes.out) == texts[worker]
        os.close(fd)
    assert pipes.finish(7) == texts[7]
    assert pipes.finish(8) == texts[8][-TAIL_BYTES:]
    assert pipes.poller.poll(0) == []
    assert pipes.finish(7) == b""  # returned only once


def test_lines_and_stacks_of_several_workers_do_not_mix(pipes: Pipes) -> None:
    ends = [open_for(pipes, worker) for worker in (1, 2)]
    parts = [
        b"he",
        b"llo\nFatal Python error: Seg",
        b"mentation\n\n",
        b'  File "',
        b"a",
    ]
    for part in parts:
        for end in ends:
            os.write(end, part)
            handle_all(pipes, pipes.poller)
    assert read_all(pipes.out) == b"hello\n" * 2
    for end in ends:
        os.close(end)
    whole = b"".join(parts)
    assert pipes.finish(1) == pipes.finish(2) == whole
    assert read_all(pipes.out) == whole.removeprefix(b"hello\n") * 2


@pytest.mark.parametrize("is_told", [True, False])
def test_the_stack_of_a_crash_is_shown_once(pipes: Pipes, is_told: bool) -> None:
    stack = b"Fatal Python error: Seg\nStack (most recent call first):\n  File\n"
    ends = {worker: open_for(pipes, worker) for worker in (1, 2, 3)}
    for end in ends.values():
        os.write(end, b"hello\n" + stack)
        handle_all(pipes, pipes.poller)
    assert read_all(pipes.out) == b"hello\n" * 3
    os.close(ends[1])  # detected before the exit is reported
    handle_all(pipes, pipes.poller)
    for worker in (1, 2):  # a process left behind by worker 2 holds its pipe
        assert pipes.finish(worker, is_reported=is_told) == b"hello\n" + stack
    assert read_all(pipes.out) == (b"" if is_told else 2 * stack)
    for worker in (2, 3):
        os.close(ends[worker])
    handle_all(pipes, pipes.poller)
    pipes.close()  # before the exit of worker 3 is reported
    assert read_all(pipes.out) == stack


def test_an_incomplete_line_is_buffered_up_to_a_limit(pipes: Pipes) -> None:
    end = open_for(pipes, 1)
    os.write(end, b"10 %\r20 %")
    handle_all(pipes, pipes.poller)
    assert read_all(pipes.out) == b"10 %\r"
    os.write(end, bytes(20_000))
    handle_all(pipes, pipes.poller)
    assert read_all(pipes.out) == b"20 %" + bytes(20_000)
    os.close(end)
    pipes.finish(1)


def test_output_of_processes_that_a_worker_leaves_behind_is_forwarded(
    pipes: Pipes,
) -> None:
    fd = open_for(pipes, 1)
    os.write(fd, b"worker")
    assert pipes.finish(1) == b"worker"  # without waiting for end of file
    os.write(fd, b", its child")
    handle_all(pipes, pipes.poller)
    assert read_all(pipes.out) == b"worker, its child"
    os.close(fd)
    handle_all(pipes, pipes.poller)
    assert not pipes._workers


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_writers_do_not_wait_for_the_reader_and_dropped_bytes_are_reported(
    kind: str,
) -> None:
    if kind == "pipe":
        out, write_fd = os.pipe()
    else:  # a socket cannot be opened again
        ours, theirs = socket.socketpair()
        out, write_fd = ours.detach(), theirs.detach()
    os.set_blocking(out, False)
    poller = select.poll()
    pipes = StderrPipes(poller, write_fd)
    fd = open_for(pipes, 1)
    for _ in range(64):
        os.write(fd, b"." * 0x10000)  # would block if the pipe were not read
        handle_all(pipes, poller)
    assert pipes.finish(1) == b"." * TAIL_BYTES
    os.close(fd)
    passed_on = read_all(out)
    while pipes._unsent:
        handle_all(pipes, poller)
        passed_on += read_all(out)
    assert 1 << 19 < len(passed_on) < 3 << 20
    fd = open_for(pipes, 2)
    os.write(fd, b"again\n")
    handle_all(pipes, poller)
    note, _, rest = read_all(out).partition(b"\n")
    assert rest == b"again\n"
    dropped = 64 * 0x10000 - len(passed_on)
    assert note == f"[envserve: {dropped} bytes of worker output dropped]".encode()
    assert os.get_blocking(write_fd)  # other processes share this open file
    os.close(fd)
    handle_all(pipes, poller)
    for each in (out, write_fd):
        os.close(each)


def test_the_rate_of_forwarded_output_is_limited(pipes: Pipes) -> None:
    fd = open_for(pipes, 1)
    line = b"." * 8191 + b"\n"
    seconds, num_forwarded = 60, 0
    for _ in range(seconds * 50):
        os.write(fd, line)
        handle_all(pipes, pipes.poller)
        num_forwarded += len(read_all(pipes.out))
        pipes.now += 1 / 50
    assert 8 << 20 < num_forwarded < (8 << 20) + (seconds << 14) + 100 * seconds
    pipes.now += 1.0
    os.write(fd, b"again\n")
    handle_all(pipes, pipes.poller)
    note, _, rest = read_all(pipes.out).partition(b"\n")
    assert rest == b"again\n"
    assert b" bytes of worker output dropped]" in note
    os.close(fd)
    pipes.finish(1)


def test_closing_does_not_wait_for_a_slow_reader(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.worker.stderr_pipes._LAST_FLUSH_MS", 0)
    monkeypatch.setattr(pipes, "_flush", lambda: pipes._unsent.pop())
    pipes._unsent += b"more than it reads in time"
    pipes.close()
    assert pipes._unsent


def test_reader_that_is_gone_and_a_closed_stderr_cost_only_the_output() -> None:
    out, write_fd = os.pipe()
    poller = select.poll()
    pipes = StderrPipes(poller, write_fd)
    closed = StderrPipes(poller, 10_000)
    os.close(out)
    for each in (pipes, closed):
        fd = open_for(each, 1)
        os.write(fd, b"lost")
        os.close(fd)
        assert each.finish(1) == b"lost"
    assert poller.poll(0) == []
    os.close(write_fd)


def test_lack_of_descriptors_costs_a_worker_only_its_own_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", refuse)
    pipes = StderrPipes(select.poll())
    assert pipes.open(1) is None
    assert pipes.finish(1) == b""


# With real workers.


@pytest.mark.parametrize(
    ("script", "exit_code", "tail"),
    [
        ("os.write(2, b'\\xff\\x00\\n'); os._exit(3)", 3, "\\xff\x00\n"),
        ("sys.stderr.write('\\udcff'); os._exit(3)", 3, "\\udcff"),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "in string_at"),
        ("os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("os.system('echo of a child >&2'); os._exit(3)", 3, "of a child\n"),
    ],
)
def test_exit_of_a_worker_includes_the_end_of_its_stderr(
    make_pool: PoolMaker, script: str, exit_code: int, tail: str
) -> None:
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs={"step": script})
    process = pool._workers.all[0].process
    assert process is not None
    step(pool, 0)
    assert process.exit is not None
    assert process.exit.exit_code == exit_code
    assert tail in process.exit.stderr_tail


def test_worker_inherits_no_read_end_of_the_others(make_pool: PoolMaker) -> None:
    # If workers held each other's read ends, they would wait for a reader forever.
    pool = make_pool.and_reset(
        SCRIPT,
        3,
        3,
        env_kwargs={"info": "{'fds': len(os.listdir('/dev/fd'))}"},
        infos="all",
    )
    counts = {
        info["fds"] for outcome in step(pool, 0) for info in outcome.infos.values()
    }
    assert len(counts) == 1


CHATTY = """
import sys, time
from envserve.pool.launcher import Launcher
from envserve.lane import Reset
from envserve.settings import PoolSettings
from envserve.pool.pool import Pool
launcher = Launcher(["odd_envs"])
config = PoolSettings(
    env_name="odd_envs/Script-v0", num_envs=2, num_workers=2, seed=1,
    env_kwargs={"step": "sys.stderr.write('spam ' * 40000); print('eggs' * 40000)"},
)
with Pool(config, launcher=launcher) as pool:
    while not pool.is_ready:
        pool.collect(1.0)
    pool.submit_reset([Reset(0), Reset(1)])
    num_finished = len(pool.collect(30.0, 2))
    for _ in range(10):
        pool.submit_step([0, 1])
        num_finished += len(pool.collect(30.0, 2))
    print(num_finished, "finished", flush=True)
launcher.close()
"""


def test_chatty_workers_keep_stepping_while_their_output_is_not_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "odd_envs.py").write_text(ODD_ENVS)
    process = subprocess.Popen(
        [sys.executable, "-c", CHATTY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # never read
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.pathsep.join(sys.path)}"},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"22 finished\n"
        assert process.wait(60.0) == 0
        said = process.stderr.read()
    assert b"spam spam" in said
