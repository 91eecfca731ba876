"""What a server tells systemd, read from a socket in its place."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from envserve.server.systemd import Notifier
from tests.envserve.conftest import Serve
from tests.envserve.limits import resource_limit


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(tmp_path / "user@1000"))  # as a path may well be called
        datagrams.settimeout(120)
        yield datagrams


def test_a_server_says_that_it_is_ready_alive_and_stopping(
    serve: Serve, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "500000")
    server = serve()
    assert systemd.recv(999).decode() == f"READY=1\nSTATUS=serving on {server.address}"
    assert {systemd.recv(999) for _ in range(3)} == {b"WATCHDOG=1"}
    server.signal(signal.SIGTERM)
    while (told := systemd.recv(999)) == b"WATCHDOG=1":
        pass
    assert told == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "/nobody/listens"])
async def test_without_a_listener_nothing_is_said_and_nothing_fails(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with closing(Notifier(asyncio.get_running_loop())) as notifier:
        notifier.ready("here")
        notifier.stopping()
    assert len(caplog.messages) == (2 if address else 0)


async def test_workers_inherit_no_way_to_speak_for_the_server(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")  # another process is watched
    with closing(Notifier(asyncio.get_running_loop())) as notifier:
        notifier.ready("here")
        notifier.stopping()
    assert not [name for name in os.environ if name.startswith(("NOTIFY", "WATCHDOG"))]
    assert systemd.recv(999) == b"READY=1\nSTATUS=here"
    assert systemd.recv(999) == b"STOPPING=1"


async def test_a_server_without_a_free_descriptor_for_a_while_is_alive_after_it(
    systemd: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "500000")
    with closing(Notifier(asyncio.get_running_loop())) as notifier:
        with resource_limit(os.getpid(), resource.RLIMIT_NOFILE, 0):
            notifier.ready("here")
            notifier.stopping()
        told = [message.partition(": ")[0] for message in caplog.messages]
        assert told == [
            f"cannot notify systemd of {text!r}"
            for text in ("READY=1\nSTATUS=here", "WATCHDOG=1", "STOPPING=1")
        ]
        assert await asyncio.to_thread(systemd.recv, 999) == b"WATCHDOG=1"
        assert await asyncio.to_thread(systemd.recv, 999) == b"WATCHDOG=1"
