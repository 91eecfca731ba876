"""The proxy: bytes pass as they are, but for what is done to their connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from envserve.chaos.proxy import Proxy
from envserve.chaos.toxics import Toxics

#: As long as a greeting, and after that a message of one frame.
SHORT = b"\0\x3e" + bytes(range(62))
CALM = Toxics()
LINGER_ZERO = struct.pack("ii", 1, 0)
MakeProxy = Callable[..., Proxy]


@pytest.fixture
def make_proxy() -> Iterator[MakeProxy]:
    made: list[Proxy] = []

    def make(target: str, to_server: Toxics = CALM, to_client: Toxics = CALM) -> Proxy:
        made.append(Proxy(target, to_server=to_server, to_client=to_client, seed=1))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


def address_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def connect(
    proxy: Proxy, listener: socket.socket
) -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a connection through a proxy."""
    port = int(proxy.address.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    server, _ = listener.accept()
    server.settimeout(20)
    return client, server


def read_one(proxy: Proxy) -> bytes:
    port = int(proxy.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        return client.recv(1)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"\0\0")


def count_until_reset(source: socket.socket, sink: socket.socket) -> int:
    """Returns how many bytes of empty messages come through."""
    received = 0
    try:
        while True:
            source.sendall(b"\0\0")
            received += len(sink.recv(2))
    except ConnectionError:
        return received


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        received += connection.recv(num_bytes - len(received))
    return received


def test_messages_pass_in_order_in_both_directions(make_proxy: MakeProxy) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for end in (router, dealer):
            end.setsockopt(zmq.RCVTIMEO, 20_000)
        router.bind("tcp://127.0.0.1:0")
        target = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        proxy = make_proxy(target)
        dealer.connect(proxy.address)
        messages = [[b"%d" % i, bytes(i)] for i in range(300)]
        messages.append([bytes(1 << 20), b"", b"end"])
        for message in messages:
            dealer.send_multipart(message)
        for message in messages:
            received = router.recv_multipart()
            assert received[1:] == message
            router.send_multipart(received)
        for message in messages:
            assert dealer.recv_multipart() == message
        for direction in (proxy.to_server, proxy.to_client):
            assert direction.counts == {"messages": len(messages)}
        assert proxy.num_connections == 1
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_reset_cuts_within_what_is_sent_and_breaks_both_ends(
    make_proxy: MakeProxy, listener: socket.socket, direction: str
) -> None:
    toxics = {direction: Toxics(bytes_until_reset=20.0)}
    proxy = make_proxy(address_of(listener), **toxics)
    lengths: set[int] = set()
    while len(lengths) < 20:
        client, server = connect(proxy, listener)
        with client, server:
            ends = (client, server) if direction == "to_server" else (server, client)
            lengths.add(count_until_reset(*ends))
            for end in ends:
                with pytest.raises(ConnectionError):
                    send_for_ever(end)
    assert {length % 2 for length in lengths} == {0, 1}


def test_a_close_passes_after_all_that_was_sent(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    toxics = Toxics(latency_seconds=0.05, slice_bytes=1)
    proxy = make_proxy(address_of(listener), to_server=toxics)
    client, server = connect(proxy, listener)
    with client, server:
        client.sendall(SHORT)
        client.close()
        assert receive(server, len(SHORT)) == SHORT
        assert server.recv(1) == b""


def test_slices_are_written_one_by_one(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    proxy = make_proxy(address_of(listener), to_client=Toxics(slice_bytes=1))
    client, server = connect(proxy, listener)
    with client, server:
        sizes = []
        for _ in range(20):
            server.sendall(SHORT)
            left = len(SHORT)
            while left:
                sizes.append(len(client.recv(left)))
                left -= sizes[-1]
        assert min(sizes) == 1
        assert len(sizes) > 20


def test_latency_holds_up_what_is_sent(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    proxy = make_proxy(address_of(listener), to_server=Toxics(latency_seconds=0.2))
    client, server = connect(proxy, listener)
    with client, server:
        started = time.monotonic()
        client.sendall(SHORT)
        assert receive(server, len(SHORT)) == SHORT
        assert time.monotonic() - started >= 0.2


def test_a_stalled_direction_keeps_what_is_sent_until_it_is_healed(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    proxy = make_proxy(address_of(listener))
    client, server = connect(proxy, listener)
    with client, server:
        proxy.change(to_server=Toxics(is_stalled=True))
        client.sendall(SHORT)
        server.sendall(SHORT)  # the other direction goes on
        assert receive(client, len(SHORT)) == SHORT
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.recv(1)
        server.settimeout(20)
        proxy.change(to_server=Toxics(), to_client=Toxics())
        assert receive(server, len(SHORT)) == SHORT


def test_a_client_of_a_server_that_is_gone_is_cut_off(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    proxy = make_proxy(address_of(listener))
    listener.close()
    with pytest.raises(ConnectionError):  # now or in a moment
        read_one(proxy)


def test_a_proxy_that_is_closed_listens_no_more_and_has_no_thread(
    make_proxy: MakeProxy, listener: socket.socket
) -> None:
    proxy = make_proxy(address_of(listener))
    client, server = connect(proxy, listener)
    proxy.close()
    with client, server:
        assert client.recv(1) == server.recv(1) == b""
    port = int(proxy.address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not any(t.name.startswith("proxy of") for t in threading.enumerate())


def test_a_proxy_outlives_ends_that_reset_their_connections(
    make_proxy: MakeProxy,
    listener: socket.socket,
    random_generator: np.random.Generator,
) -> None:
    toxics = Toxics(bytes_until_reset=200.0)
    proxy = make_proxy(address_of(listener), to_server=toxics, to_client=toxics)
    for _ in range(300):
        client, server = connect(proxy, listener)
        with client, server:
            ends = [client, server]
            for index in random_generator.permutation(2):
                end = ends[index]
                for _ in range(random_generator.integers(3)):
                    with contextlib.suppress(ConnectionError):
                        end.sendall(bytes(2 * int(random_generator.integers(100))))
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
    proxy.change(to_server=Toxics(), to_client=Toxics())
    client, server = connect(proxy, listener)
    with client, server:
        client.sendall(SHORT)
        assert receive(server, len(SHORT)) == SHORT
