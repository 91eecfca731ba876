"""Connections with slow lookups, unknown hosts, or without a free descriptor."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import zmq

from envserve.client.link.connection import Connection
from envserve.client.link.zmq_guards.resolver import needs_no_lookup, resolve_host

FOUR = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
SIX = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))


@pytest.fixture
def port() -> Iterator[int]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield router.bind_to_random_port("tcp://127.0.0.1")


@pytest.mark.parametrize(
    ("known", "expected"),
    [([SIX, FOUR], "tcp://127.0.0.1:7"), ([SIX], "tcp://[::1]:7")],
)
def test_a_host_resolves_to_the_ip_address_that_servers_most_likely_bind(
    known: list[Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    assert resolve_host("tcp://sim1:7") == expected
    for address in ("tcp://10.0.0.1:7", "tcp://[fe80::1]:7", "ipc:///x/envs"):
        assert needs_no_lookup(address)
        assert resolve_host(address) == address


def test_an_unresponsive_name_server_does_not_block_other_connections(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        answers.wait(300)
        return [FOUR]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    address = f"tcp://sim1:{port}"
    with closing(Connection(address, insecure=True)):
        pass  # closing would block if libzmq looked up the name
    with closing(Connection(address, insecure=True)) as connection:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(9):
            connection.renew()
            assert connection.poll() == (False, False)
        until = time.monotonic() + 60
        # Previous sockets stay open for a while.
        while len(os.listdir("/proc/self/fd")) > before + 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert asked == ["sim1"] * 2
        answers.set()
        while not connection.poll()[1]:
            assert time.monotonic() < until
            connection.wait(0.1, for_writing=True)


def test_an_unknown_host_is_looked_up_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, asked = False, threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [FOUR]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with closing(Connection(f"tcp://sim1:{port}", insecure=True)) as connection:
        assert asked.wait(300)
        known = True
        until = time.monotonic() + 60
        while not connection.poll()[1]:
            assert time.monotonic() < until
            connection.renew()
            connection.wait(1.0, for_writing=True)


def test_renew_changes_nothing_if_there_is_no_free_descriptor(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    with closing(Connection(f"tcp://127.0.0.1:{port}", insecure=True)) as connection:
        longest = connection.max_frame_bytes
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", refuse)
            connection.renew(2 * longest)
        assert connection.max_frame_bytes == longest
        until = time.monotonic() + 60
        while not connection.poll()[1]:
            assert time.monotonic() < until
            connection.wait(0.1, for_writing=True)
