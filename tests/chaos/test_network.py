"""The faults that the network cases count do happen: on messages, and on sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from envserve.wire.constants import MessageType
from envserve.wire.message import Message, decode, encode
from tests.chaos.network_faults import Direction, NetworkFaults
from tests.chaos.proxy import Proxy
from tests.chaos.zmtp import first_frame

#: As long as a ZMTP greeting.
GREETING = b"\0\x3e" + bytes(range(62))


def request(number: int, kind: MessageType = MessageType.STEP) -> bytes:
    """A message of one short ZMTP frame."""
    message = Message(type=kind, request=number, entries=((0, number),))
    data = b"".join(encode(message))
    return bytes([0, len(data)]) + data


def run(faults: NetworkFaults, messages: list[bytes]) -> tuple[list[bytes], Direction]:
    direction = Direction(faults, seed=5)
    going = [out for message in messages for out in direction.take(message)]
    return going + direction.release(), direction


@pytest.mark.parametrize(
    ("name", "extra"),
    [("drop", -1), ("duplicate", 1), ("stale_copy", 1), ("reorder", 0), ("retry", 1)],
)
def test_each_fault_of_messages_happens_as_often_as_it_is_counted(
    name: str, extra: int
) -> None:
    messages = [request(number) for number in range(400)]
    chances: dict[str, Any] = {name: 0.3}
    faults = NetworkFaults(**chances)
    going, direction = run(faults, messages)
    strikes = direction.counts[name]
    assert direction.counts == {"messages": 400, name: strikes}
    assert 0.2 * 400 < strikes < 0.4 * 400
    assert len(going) == 400 + extra * strikes
    assert run(faults, messages)[0] == going  # the same seed, the same faults
    if name == "reorder":
        assert sum(a != b for a, b in zip(going, messages, strict=True)) >= strikes


def test_a_retry_is_the_same_request_with_a_higher_attempt() -> None:
    first, answer = request(1), request(2, MessageType.RESULT)
    going, _ = run(NetworkFaults(retry=1.0), [first, answer])
    assert [going[0], *going[2:]] == [first, answer]  # requests only
    retry, original = (decode([m[first_frame(m)]]) for m in (going[1], first))
    assert (original.attempt, retry.attempt) == (0, 1)
    retry.attempt = 0
    assert retry == original


class Line:
    """A proxy in front of a listener."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._listener.settimeout(60)
        target = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.proxy = stack.enter_context(Proxy(target, seed=1))

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection through the proxy: client and server."""
        port = int(self.proxy.address.rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        server, _ = self._listener.accept()
        server.settimeout(60)
        return self._stack.enter_context(client), self._stack.enter_context(server)


@pytest.fixture
def line() -> Iterator[Line]:
    with contextlib.ExitStack() as stack:
        yield Line(stack)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        received += connection.recv(num_bytes - len(received))
    return received


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"\0\0")


@pytest.mark.parametrize("is_to_server", [True, False])
def test_a_reset_cuts_within_a_message_and_breaks_both_ends(
    line: Line, is_to_server: bool
) -> None:
    line.proxy.change(
        **{
            "to_server" if is_to_server else "to_client": NetworkFaults(
                bytes_until_reset=20.0
            )
        }
    )
    lengths: set[int] = set()
    while len(lengths) < 20:
        source, sink = ends = line.connect()[:: 1 if is_to_server else -1]
        received = 0
        with contextlib.suppress(ConnectionError):
            while True:
                source.sendall(b"\0\0")
                received += len(sink.recv(2))
        lengths.add(received)
        for end in ends:
            with pytest.raises(ConnectionError):
                send_for_ever(end)
    assert {length % 2 for length in lengths} == {0, 1}


def test_latency_delays_bytes_and_a_stall_holds_them_back(line: Line) -> None:
    client, server = line.connect()
    line.proxy.change(to_server=NetworkFaults(latency_seconds=0.2, slice_bytes=1))
    started = time.monotonic()
    client.sendall(GREETING)
    assert receive(server, len(GREETING)) == GREETING
    assert time.monotonic() - started >= 0.2
    line.proxy.change(to_server=NetworkFaults(is_stalled=True))
    client.sendall(request(1))
    server.sendall(GREETING)  # the other direction is not affected
    assert receive(client, len(GREETING)) == GREETING
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.settimeout(60)
    line.proxy.change(to_server=NetworkFaults())
    assert receive(server, len(request(1))) == request(1)
