"""Connections with slow lookups, unknown hosts, or without a free descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import zmq

from envserve.client.link.connection import Connection
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.sessionless_requests import request_welcome
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.client.link.zmq_guards.resolver import needs_no_lookup, resolve_host
from envserve.errors import ConnectError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.session.client.liveness import Timeouts
from tests.envserve.conftest import Serve, WaitUntil
from tests.envserve.server_process import make_config


@pytest.fixture
def port() -> Iterator[int]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield router.bind_to_random_port("tcp://127.0.0.1")


def entry(ip: str) -> tuple[Any, ...]:
    """Return an address as `getaddrinfo` does."""
    if ":" not in ip:
        return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))
    host, _, zone = ip.partition("%")
    return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, 0, 0, int(zone or 0)))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (["::1", "127.0.0.1"], ["127.0.0.1", "[::1]"]),
        (["::1"], ["[::1]"]),
        (["fe80::1%2"], ["[fe80::1%2]"]),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"]),
        (
            ["::1", "::2", "::3", "10.0.0.1", "10.0.0.2"],
            ["10.0.0.1", "[::1]", "10.0.0.2", "[::2]", "[::3]"],
        ),
    ],
)
def test_a_host_resolves_to_all_its_addresses_beginning_with_ipv4(
    known: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: map(entry, known))
    assert resolve_host("tcp://sim1:7") == [f"tcp://{ip}:7" for ip in expected]
    for address in ("tcp://10.0.0.1:7", "tcp://[fe80::1%2]:7", "ipc:///x/envs"):
        assert needs_no_lookup(address)
        assert resolve_host(address) == [address]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a host name of these addresses."""
    look_up = socket.getaddrinfo

    def name(*ips: str) -> str:
        def look_up_two(host: Any, *arguments: Any, **options: Any) -> Any:
            if host == "two":
                return list(map(entry, ips))
            return look_up(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", look_up_two)
        return "two"

    return name


@contextlib.contextmanager
def silent_listener(port: int) -> Iterator[str]:
    """Listen on another loopback address, accept connections, and send nothing."""
    with socket.create_server(("127.0.0.2", port)) as listener:
        yield str(listener.getsockname()[0])


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
@pytest.mark.parametrize("is_first", [False, True], ids=["second", "first"])
@pytest.mark.parametrize("renews", [False, True], ids=["waits", "renews"])
def test_a_server_at_any_address_of_its_host_is_found(
    port: int, two: Callable[..., str], is_silent: bool, is_first: bool, renews: bool
) -> None:
    ips = ["127.0.0.1", "127.0.0.2"] if is_first else ["127.0.0.2", "127.0.0.1"]
    with contextlib.ExitStack() as stack:
        if is_silent:
            stack.enter_context(silent_listener(port))
        address = f"tcp://{two(*ips)}:{port}"
        connection = stack.enter_context(closing(Connection(address, insecure=True)))
        until = time.monotonic() + 60
        while not connection.poll()[1]:
            assert time.monotonic() < until
            connection.wait(3.0, for_writing=True)
            if renews and not connection.poll()[1]:
                connection.renew()
        assert connection.resolved == [f"tcp://{ip}:{port}" for ip in ips]


def test_a_server_with_the_expected_key_is_found_behind_another_one(
    two: Callable[..., str], serve: Serve
) -> None:
    """The first address of the host belongs to a server with another key."""
    server = serve()
    port = int(server.address.rpartition(":")[2])
    keys = KeyFolder().keys_for(server.address)
    assert keys is not None
    with zmq.Context() as context, context.socket(zmq.ROUTER) as another:
        another.setsockopt(zmq.CURVE_SERVER, 1)
        another.setsockopt(zmq.CURVE_SECRETKEY, KeyPair.generate().secret)
        another.bind(f"tcp://127.0.0.2:{port}")
        address = f"tcp://{two('127.0.0.2', '127.0.0.1')}:{port}"
        KeyFolder().add_pin([address], keys[0], "local")
        assert diagnose_connection(address, keys, 60.0) is Finding.OK
        assert request_welcome(address, 60.0).num_names > 0
        with closing(RemoteLane(address, make_config(), Timeouts())) as lane:
            lane.finish_start(time.monotonic() + 60)


def test_the_error_names_the_addresses_that_were_tried(two: Callable[..., str]) -> None:
    address = f"tcp://{two('127.0.0.2', '::1')}:1"
    expected = (
        r"tcp://two:1: (no server replied within 1 s|connection refused) at "
        r"tcp://127.0.0.2:1, tcp://\[::1\]:1"
    )
    with pytest.raises(ConnectError, match=expected):
        request_welcome(address, 1.0, insecure=True)
    lane = RemoteLane(
        address, make_config(), Timeouts(connect_seconds=1.0), insecure=True
    )
    with closing(lane), pytest.raises(ConnectError, match=expected):
        lane.finish_start(time.monotonic() + 60)


def test_a_host_is_gone_only_if_all_its_addresses_refuse_connections(
    two: Callable[..., str], port: int
) -> None:
    address = f"tcp://{two('127.0.0.2', '127.0.0.1')}:{port}"
    assert diagnose_connection(address, None, 60.0) is Finding.OK
    address = f"tcp://{two('127.0.0.2', '127.0.0.3')}:{port}"
    with silent_listener(port):
        assert diagnose_connection(address, None, 1.0) is Finding.SILENT
    assert diagnose_connection(address, None, 60.0) is Finding.REFUSED


def test_an_unresponsive_name_server_does_not_block_other_connections(
    port: int, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    has_replied = threading.Event()

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        has_replied.wait(300)
        return [entry("127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    address = f"tcp://sim1:{port}"
    with closing(Connection(address, insecure=True)):
        pass  # closing would block if libzmq looked up the name
    with closing(Connection(address, insecure=True)) as connection:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(9):
            connection.renew()
            assert connection.poll() == (False, False)
        # Previous sockets stay open for a while.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 3, 60)
        assert asked == ["sim1"] * 2
        has_replied.set()
        wait_until(lambda: connection.poll()[1], 60)


def test_an_unknown_host_is_looked_up_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, asked = False, threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [entry("127.0.0.1")]

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
    port: int, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    with closing(Connection(f"tcp://127.0.0.1:{port}", insecure=True)) as connection:
        longest = connection.max_frame_bytes
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Context, "socket", refuse)
            connection.renew(2 * longest)
        assert connection.max_frame_bytes == longest
        wait_until(lambda: connection.poll()[1], 60)
