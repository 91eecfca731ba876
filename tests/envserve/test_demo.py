"""The demo's faults cause no wrong transitions, and its processes exit with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from envserve.cli.app import PROGRAM
from envserve.demo.run import Demo
from envserve.demo.servers import DemoServer
from envserve.demo.tcp_proxy import TcpProxy
from envserve.errors import EnvserveError, ServerError, SpaceError, UnknownEnv
from tests.command_line import invoke
from tests.leak_checks import left_processes, running_processes

#: All processes exit immediately, but a loaded machine may delay that.
END_SECONDS = 30.0


def test_each_fault_is_reported_and_causes_no_wrong_transition(tmp_path: Path) -> None:
    with Demo("CartPole-v1", 8, tmp_path) as demo:
        for name in ("network", "worker", "env", "server"):
            label, inject = demo.controls[name]
            text = inject()
            found = re.match(rf"{label}: (\d) envs of server [12] recovered", text)
            assert found is not None, text
            assert 1 <= int(found[1]) <= 4
        _, learn_again = demo.controls["learn"]
        assert "a new policy" in learn_again()
    demo.check()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    assert row["demo_wrong"] == 0
    assert row["rows_checked"] > row["steps"] > 0
    # Padding is not counted; the others are first observations, and at most a late row
    # of each env for each fault.
    others = row["rows_checked"] - row["steps"] - row["rows_lost"]
    assert 8 <= others <= 8 + 4 * 8
    assert row["demo_faults"] == 4
    assert 1 <= row["rows_lost"] <= 12
    assert row["demo_recovery_ms Kill a server"] > 0
    assert (
        str(demo) == f"{row['rows_checked']:,} transitions checked, 4 faults, 0 wrong"
    )
    with pytest.raises(ServerError, match="ended"):
        demo.controls["worker"][1]()


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        ("CartPoll-v1", UnknownEnv, "CartPole-v1"),
        ("FrozenLake-v1", SpaceError, "FrozenLake-v1: expected Box observations"),
    ],
)
def test_an_unsupported_env_raises_before_anything_is_started(
    env: str, error: type[EnvserveError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        Demo(env, 2, tmp_path)
    assert not any(tmp_path.iterdir())


def test_each_server_has_room_for_its_envs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Server(DemoServer):
        def __init__(self, _: Path, *options: str) -> None:
            raise ServerError(" ".join(options))

    monkeypatch.setattr("envserve.demo.run.DemoServer", Server)
    with pytest.raises(ServerError, match="--envs-per-worker 300"):
        Demo("CartPole-v1", 300, tmp_path)


def test_the_terminal_shows_the_rows_of_both_servers_and_messages_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_pressed, has_ended = threading.Event(), threading.Event()
    presses = ["w"]

    def act() -> str:
        is_pressed.set()
        return "killed"

    @contextlib.contextmanager
    def keyboard() -> Iterator[Callable[[float], str]]:
        def wait(_: float) -> str:
            if presses:
                return presses.pop()
            assert is_pressed.wait(END_SECONDS)
            has_ended.set()
            return ""

        yield wait

    demo = mock.MagicMock(
        metrics={"demo_wrong": 0, "rows_checked": 7},
        num_faults=0,
        controls={"worker": ("Kill [/]", act)},
        has_ended=has_ended,
    )
    demo.__enter__.return_value = demo
    demo.absent_rows.return_value = np.array([False, True, False, False, False])
    monkeypatch.setattr("envserve.demo.run.Demo", lambda *_: demo)
    monkeypatch.setattr("envserve.cli.demo.keyboard", keyboard)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = invoke(PROGRAM, ["demo", "--terminal", "--num-envs", "5"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert {"server 1  # .", "server 2  # # #", "Kill [/] ..."} <= {*lines}


@pytest.fixture
def ends() -> Iterator[tuple[TcpProxy, socket.socket, socket.socket]]:
    """A proxy, and the sockets at both ends of a proxied connection."""
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


def test_the_proxy_forwards_in_both_directions_and_delays_data_during_a_cut(
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


def test_the_proxy_closes_both_connections_when_either_peer_disconnects(
    ends: tuple[TcpProxy, socket.socket, socket.socket],
) -> None:
    _, near, far = ends
    far.close()
    assert near.recv(10) == b""


def test_a_demo_in_the_terminal_leaves_no_processes_when_it_is_killed() -> None:
    before = running_processes()
    command = [sys.executable, "-m", "envserve", "demo", "--terminal", "--num-envs=2"]
    ours, theirs = os.openpty()
    output = b""

    def read_until(pattern: bytes) -> None:
        nonlocal output
        while not re.search(pattern, output):
            output += os.read(ours, 1 << 16)

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as demo:
        read_until(rb"Starting two servers and 2 envs")
        read_until(rb"0 of [1-9][\d,]* transitions wrong")
        os.write(ours, b"w")
        read_until(rb"Kill a worker: 1 envs of server [12] recovered after [\d,]+ ms")
        read_until(rb"faults: 1,")
        # The demo, two servers, two template processes, and two workers.
        assert len(running_processes().keys() - before.keys()) >= 7
        demo.kill()
    for end in (ours, theirs):
        os.close(end)
    assert left_processes(before, time.monotonic() + END_SECONDS) == []
