"""The proxy: bytes pass as they are, but for what is done to their connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tests.chaos.proxy import Proxy
from tests.chaos.toxics import Toxics

#: As long as a greeting, and after that a message of one frame.
SHORT = b"\0\x3e" + bytes(range(62))
LINGER_ZERO = struct.pack("ii", 1, 0)
Ends = tuple[socket.socket, socket.socket]


class Line:
    """A proxy in front of a listener, with everything closed in the end."""

    def __init__(self, stack: contextlib.ExitStack, **toxics: Any) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(60)
        target = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.proxy = stack.enter_context(Proxy(target, seed=1, **toxics))
        self.port = int(self.proxy.address.rpartition(":")[2])

    def connect_client(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self._stack.enter_context(connection)

    def connect(self) -> Ends:
        """Returns both ends of a connection through the proxy: client and server."""
        client = self.connect_client()
        server, _ = self.listener.accept()
        server.settimeout(60)
        return client, self._stack.enter_context(server)


MakeLine = Callable[..., Line]


@pytest.fixture
def make_line() -> Iterator[MakeLine]:
    with contextlib.ExitStack() as stack:
        yield lambda **toxics: Line(stack, **toxics)


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


def test_messages_pass_in_order_in_both_directions() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for end in (router, dealer):
            end.setsockopt(zmq.RCVTIMEO, 60_000)
        router.bind("tcp://127.0.0.1:0")
        target = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        proxy = stack.enter_context(Proxy(target))
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


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_reset_cuts_within_what_is_sent_and_breaks_both_ends(
    make_line: MakeLine, direction: str
) -> None:
    line = make_line(**{direction: Toxics(bytes_until_reset=20.0)})
    lengths: set[int] = set()
    while len(lengths) < 20:
        client, server = line.connect()
        ends = (client, server) if direction == "to_server" else (server, client)
        lengths.add(count_until_reset(*ends))
        for end in ends:
            with pytest.raises(ConnectionError):
                send_for_ever(end)
    assert {length % 2 for length in lengths} == {0, 1}


def test_a_close_passes_after_all_that_was_sent(make_line: MakeLine) -> None:
    toxics = Toxics(latency_seconds=0.05, slice_bytes=1)
    client, server = make_line(to_server=toxics).connect()
    client.sendall(SHORT)
    client.close()
    assert receive(server, len(SHORT)) == SHORT
    assert server.recv(1) == b""


def test_slices_are_written_one_by_one(make_line: MakeLine) -> None:
    client, server = make_line(to_client=Toxics(slice_bytes=1)).connect()
    sizes = []
    for _ in range(20):
        server.sendall(SHORT)
        left = len(SHORT)
        while left:
            sizes.append(len(client.recv(left)))
            left -= sizes[-1]
    assert min(sizes) == 1
    assert len(sizes) > 20


def test_latency_holds_up_what_is_sent(make_line: MakeLine) -> None:
    client, server = make_line(to_server=Toxics(latency_seconds=0.2)).connect()
    started = time.monotonic()
    client.sendall(SHORT)
    assert receive(server, len(SHORT)) == SHORT
    assert time.monotonic() - started >= 0.2


def test_a_stalled_direction_keeps_what_is_sent_until_it_is_healed(
    make_line: MakeLine,
) -> None:
    line = make_line()
    client, server = line.connect()
    line.proxy.change(to_server=Toxics(is_stalled=True))
    client.sendall(SHORT)
    server.sendall(SHORT)  # the other direction goes on
    assert receive(client, len(SHORT)) == SHORT
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.settimeout(60)
    line.proxy.change(to_server=Toxics(), to_client=Toxics())
    assert receive(server, len(SHORT)) == SHORT


def test_a_client_of_a_server_that_is_gone_is_cut_off(make_line: MakeLine) -> None:
    line = make_line()
    line.listener.close()
    with pytest.raises(ConnectionError):  # now or in a moment
        line.connect_client().recv(1)


def test_a_proxy_that_is_closed_listens_no_more_and_has_no_thread(
    make_line: MakeLine,
) -> None:
    line = make_line()
    client, server = line.connect()
    line.proxy.close()
    assert client.recv(1) == server.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        line.connect_client()
    assert not any(t.name.startswith("proxy of") for t in threading.enumerate())


def test_a_proxy_outlives_ends_that_reset_their_connections(
    make_line: MakeLine, random_generator: np.random.Generator
) -> None:
    toxics = Toxics(bytes_until_reset=200.0)
    line = make_line(to_server=toxics, to_client=toxics)
    for _ in range(300):
        ends = line.connect()
        for index in random_generator.permutation(2):
            end = ends[index]
            for _ in range(random_generator.integers(3)):
                with contextlib.suppress(ConnectionError):
                    end.sendall(bytes(2 * int(random_generator.integers(100))))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
        for end in ends:
            end.close()
    line.proxy.change(to_server=Toxics(), to_client=Toxics())
    client, server = line.connect()
    client.sendall(SHORT)
    assert receive(server, len(SHORT)) == SHORT
