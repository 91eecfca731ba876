"""The demo: faults cost no wrong transition, and all that it starts ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envserve.demo.run import Demo
from envserve.demo.tcp_proxy import TcpProxy
from envserve.errors import EnvserveError, ServerError, SpaceError, UnknownEnv
from tests.left_behind import left_processes, running_processes

#: All of it ends at once; a machine may stand still meanwhile.
END_SECONDS = 30.0


def test_each_strike_is_told_and_costs_no_wrong_transition(tmp_path: Path) -> None:
    with Demo("CartPole-v1", 8, tmp_path) as demo:
        for name in ("network", "worker", "env", "server"):
            label, inject = demo.faults[name]
            text = inject()
            num_hit = int(text.removeprefix(f"{label}: ").split()[0])
            assert 1 <= num_hit <= 4, text
    demo.check()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    assert row["demo_wrong"] == 0
    assert row["rows_checked"] > row["steps"] > 0
    assert row["demo_recovery_ms"] > 0
    with pytest.raises(ServerError, match="ended"):
        demo.faults["worker"][1]()


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        ("CartPoll-v1", UnknownEnv, "CartPole-v1"),
        ("FrozenLake-v1", SpaceError, "FrozenLake-v1: expected Box observations"),
    ],
)
def test_an_env_that_cannot_be_shown_is_refused_at_once(
    env: str, error: type[EnvserveError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        Demo(env, 2, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def ends() -> Iterator[tuple[TcpProxy, socket.socket, socket.socket]]:
    """A proxy, and both ends of a connection through it."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = TcpProxy(listening.getsockname()[1])
        stack.callback(proxy.close)
        port = int(proxy.address.rpartition(":")[2])
        near = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        far = stack.enter_context(listening.accept()[0])
        for end in (near, far):
            end.settimeout(10)
        yield proxy, near, far


def test_a_cable_passes_on_both_ways_and_holds_back_while_it_is_cut(
    ends: tuple[TcpProxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends
    near.sendall(b"out")
    assert far.recv(10) == b"out"
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    proxy.cut(3600.0)
    near.sendall(b"late")
    far.settimeout(0.05)
    with pytest.raises(TimeoutError):
        far.recv(10)
    proxy.cut(0.0)
    far.settimeout(10)
    assert far.recv(10) == b"late"


def test_when_one_end_of_a_cable_goes_so_does_the_other(
    ends: tuple[TcpProxy, socket.socket, socket.socket],
) -> None:
    _, near, far = ends
    far.close()
    assert near.recv(10) == b""


def test_a_terminal_is_enough_and_nothing_outlives_a_demo_that_is_killed() -> None:
    before = running_processes()
    command = [sys.executable, "-m", "envserve", "demo", "--terminal", "--num-envs=2"]
    ours, theirs = os.openpty()
    said = b""

    def read_until(pattern: bytes) -> None:
        nonlocal said
        while not re.search(pattern, said):
            said += os.read(ours, 1 << 16)

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as demo:
        read_until(rb"Starting two servers, and 2 envs")
        read_until(rb"0 wrong of [1-9]")
        os.write(ours, b"w")
        read_until(rb"Kill a worker: 1 envs back after [\d,]+ ms")
        # Itself, two servers, a template each, and a worker each.
        assert len(running_processes().keys() - before.keys()) >= 7
        demo.kill()
    for end in (ours, theirs):
        os.close(end)
    assert left_processes(before, time.monotonic() + END_SECONDS) == []
