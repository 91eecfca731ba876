"""A server's notifications to systemd, received by a test socket."""

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
        # Only a leading @ marks an abstract socket.
        datagrams.bind(str(tmp_path / "user@1000"))
        datagrams.settimeout(120)
        yield datagrams


def test_a_server_notifies_that_it_is_ready_alive_and_stopping(
    serve: Serve, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "500000")
    server = serve()
    assert systemd.recv(999).decode() == f"READY=1\nSTATUS=serving on {server.address}"
    assert {systemd.recv(999) for _ in range(3)} == {b"WATCHDOG=1"}
    server.signal(signal.SIGTERM)
    while (message := systemd.recv(999)) == b"WATCHDOG=1":
        pass
    assert message == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "/nobody/listens"])
async def test_without_a_listener_nothing_is_sent_and_nothing_fails(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with closing(Notifier(asyncio.get_running_loop())) as notifier:
        notifier.ready("here")
        notifier.stopping()
    assert len(caplog.messages) == (2 if address else 0)


async def test_workers_do_not_inherit_the_variables_of_systemd(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")  # systemd watches another process
    with closing(Notifier(asyncio.get_running_loop())) as notifier:
        notifier.ready("here")
        notifier.stopping()
    assert not [name for name in os.environ if name.startswith(("NOTIFY", "WATCHDOG"))]
    assert systemd.recv(999) == b"READY=1\nSTATUS=here"
    assert systemd.recv(999) == b"STOPPING=1"


async def test_watchdog_messages_continue_after_a_shortage_of_descriptors(
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
        texts = [message.partition(": ")[0] for message in caplog.messages]
        assert texts == [
            f"cannot notify systemd of {text!r}"
            for text in ("READY=1\nSTATUS=here", "WATCHDOG=1", "STOPPING=1")
        ]
        assert await asyncio.to_thread(systemd.recv, 999) == b"WATCHDOG=1"
        assert await asyncio.to_thread(systemd.recv, 999) == b"WATCHDOG=1"
