"""Client connections: protocol errors, endless messages, long frames, threads."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from envserve.client import BatchEnv
from envserve.client.link.connection import Connection, SharedContext
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.session_driver import SessionDriver
from envserve.client.link.zmq_guards.byte_counter import ByteCounter, FewestBytes
from envserve.errors import ConnectError, RemoteProtocolError
from envserve.host_resources import num_cores
from envserve.monitoring.observer import Observer
from envserve.session.client.client_session import ClientSession
from envserve.worker.channel import MAX_CALL_BYTES
from tests.envserve.conftest import Serve, WaitUntil
from tests.envserve.server_process import make_config
from tests.envserve.session_fakes import make_client
from tests.envserve.test_hostile_servers import PeakMemory
from tests.envserve.zmtp_peers import greeting_of, more_frames

# The client counts bytes after each poll, so a fast peer sends more than the size limit
# before the client notices: 50 to 141 MiB in 60 attempts. Without the check,
# the memory would grow until the deadline.
MAX_GROWTH_BYTES = 256 << 20


class FlakyConnection:
    """A connection that keeps breaking; libzmq reconnects only if `tries_again`."""

    def __init__(self, *, tries_again: bool) -> None:
        self._tries_again = tries_again
        self.is_there = True
        self.max_frame_bytes = self.max_row_bytes = 1 << 20
        self.waker = SimpleNamespace(wake=lambda: None)

    def receive(self) -> None:
        return None

    def flush(self, outbox: dict[int, Any]) -> bool:
        has_sent = self.is_there and bool(outbox)
        if self.is_there:
            outbox.clear()
        return has_sent

    def poll(self) -> tuple[bool, bool]:
        return False, self.is_there

    def exceeds_limit(self, is_connected: bool) -> bool:
        return False

    def is_previous_connected(self) -> bool:
        return self.is_there and self._tries_again

    def renew(self, max_frame_bytes: int = 0) -> None:
        pass

    def close_previous(self) -> None:
        pass


@pytest.mark.parametrize("tries_again", [True, False])
def test_only_sockets_that_do_not_reconnect_count_as_errors(tries_again: bool) -> None:
    """A connection that keeps breaking is not an error."""
    session: ClientSession = make_client()
    connection, now = FlakyConnection(tries_again=tries_again), 0.0
    driver = SessionDriver(session, connection)  # type: ignore[arg-type]
    for _ in range(4):  # less than the session's timeout
        for is_there, seconds in ((True, 0.1), (False, 2.2), (True, 0.1)):
            connection.is_there = is_there
            for _ in range(int(10 * seconds)):
                now += 0.1
                driver.run(now)
    assert session.state.is_over is not tries_again
    if not tries_again:
        with pytest.raises(RemoteProtocolError, match="Expected ZeroMQ messages"):
            raise session.error or AssertionError


def test_a_call_allows_longer_frames_without_shortening_the_receive_queue(
    sockets: list[zmq.Socket[bytes]],
) -> None:
    with closing(Connection("tcp://127.0.0.1:1")) as connection:
        dealers = [each for each in sockets if each.type == zmq.DEALER]
        before = dealers[0].getsockopt(zmq.RCVHWM)
        connection.renew(MAX_CALL_BYTES)
        after = [each for each in sockets if each.type == zmq.DEALER][1]
        assert int(after.getsockopt(zmq.MAXMSGSIZE)) > MAX_CALL_BYTES
        assert after.getsockopt(zmq.RCVHWM) == before


def thread_ids() -> set[int]:
    """Return the ids of all threads; those that have just ended may be included."""
    return {thread.id for thread in psutil.Process().threads()}


def test_connections_share_threads_until_the_last_is_closed(
    wait_until: WaitUntil,
) -> None:
    before = thread_ids()
    context = SharedContext(8)
    connections = [
        Connection(f"tcp://127.0.0.1:{port}", insecure=True, context=context)
        for port in range(1, 9)
    ]
    with pytest.raises(ConnectError, match="expected an address"):
        Connection("tcp://127.0.0.1:x", insecure=True, context=context)
    # An additional thread closes sockets.
    most = 1 + max(1, min(8, num_cores() // 2))
    assert 0 < len(thread_ids() - before) <= most
    for connection in connections[1:]:
        connection.close()
        connection.close()
    assert connections[0].poll() == (False, False)
    assert thread_ids() - before
    connections[0].close()
    wait_until(lambda: not thread_ids() - before)


def test_a_signal_handler_can_close_a_connection_that_opens_another_socket(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    before = thread_ids()
    connection = Connection("tcp://127.0.0.1:1", insecure=True)
    monkeypatch.setattr(zmq.Socket, "connect", lambda *_: connection.close())
    with pytest.raises(zmq.ZMQError, match="non-socket"):
        connection.renew()
    wait_until(lambda: not thread_ids() - before)


def test_a_signal_handler_can_close_a_connection_while_a_socket_is_created(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    before = thread_ids()
    connection = Connection("tcp://127.0.0.1:1", insecure=True)

    def create(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = zmq.Socket(context, kind)
        context._rm_socket(socket)  # the context does not know it yet
        connection.close()
        return socket

    monkeypatch.setattr(zmq.Context, "socket", create)
    with suppress(zmq.ZMQError, TypeError):  # the waker is closed
        connection.renew()
    connection.close()
    wait_until(lambda: not thread_ids() - before)


def test_one_thread_attaches_all_lanes(wait_until: WaitUntil) -> None:
    before = {*threading.enumerate()}  # an attacher ends some time after its lanes

    def names() -> list[str]:
        return [thread.name for thread in {*threading.enumerate()} - before]

    context = SharedContext(4)
    with ExitStack() as stack:
        for port in range(1, 5):  # no server listens there
            lane = RemoteLane(
                f"tcp://127.0.0.1:{port}", make_config(), insecure=True, context=context
            )
            stack.callback(lane.close)
        assert names().count("attacher") == 1
        assert not any(name.startswith("keepalive") for name in names())
    wait_until(lambda: "attacher" not in names(), 20)


def test_the_lanes_of_a_batch_share_threads(
    serve: Serve, wait_until: WaitUntil
) -> None:
    address = serve("--env", "CartPole-v1").address
    before = thread_ids()
    with BatchEnv.connect("CartPole-v1", [address] * 4, 8, seed=0) as batch:
        batch.reset()
        keepalive_threads, closer = 4, 1
        most = keepalive_threads + closer + max(1, min(4, num_cores() // 2))
        assert len(thread_ids() - before) <= most
    wait_until(lambda: not thread_ids() - before)


@pytest.fixture
def endless_server() -> Iterator[str]:
    """A server without keys that sends an endless message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(greeting_of(b"ROUTER"))
                    received = b""
                    while b"READY" not in received:
                        if not (data := peer.recv(256)):
                            return  # the client has closed the connection
                        received += data
                    frames = more_frames(1000, 64)
                    while True:
                        peer.sendall(frames)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()


def test_an_endless_message_ends_the_lane_and_its_memory_is_freed(
    endless_server: str,
) -> None:
    memory = PeakMemory()
    lane = RemoteLane(endless_server, make_config(), insecure=True)
    with closing(lane), pytest.raises(RemoteProtocolError, match="size limit"):
        lane.finish_start(time.monotonic() + 20.0)
    assert memory.growth() < MAX_GROWTH_BYTES


def test_an_endless_message_raises_an_error_in_an_observer(endless_server: str) -> None:
    memory = PeakMemory()
    with (
        Observer(endless_server, insecure=True) as observer,
        pytest.raises(RemoteProtocolError, match="size limit"),
    ):
        observer.status(20.0)
    assert memory.growth() < MAX_GROWTH_BYTES


def test_bytes_of_an_older_connection_do_not_count_against_a_new_one(
    wait_until: WaitUntil,
) -> None:
    """The older connection is to the same port, and was examined for another port."""
    receiver: Any = SimpleNamespace(num_messages=0)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as first,
        closing(socket.create_server(("127.0.0.1", 0))) as other,
    ):
        received: list[socket.socket] = []

        def connect(server: socket.socket, num_bytes: int) -> ByteCounter:
            peer = socket.create_connection(server.getsockname())
            received.append(peer)
            received.append(server.accept()[0])
            received[-1].sendall(bytes(num_bytes))
            peer.recv(num_bytes, socket.MSG_WAITALL)
            host, port = server.getsockname()
            counter = ByteCounter(receiver, f"tcp://{host}:{port}")
            assert counter.count(is_connected=True) == 0
            return counter

        try:
            connect(first, 1 << 20)
            assert connect(other, 64).count(is_connected=True) <= 64
            new = connect(first, 64)
            wait_until(lambda: new.count(is_connected=True) > 0, 60)
            assert new.count(is_connected=True) == 64
        finally:
            for each in received:
                each.close()


def test_bytes_are_not_counted_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", fails)
    assert FewestBytes().to_port(1, since=0.0) == 0


def test_waiting_for_a_message_ends_although_signals_keep_arriving() -> None:
    """Profilers that use signals interrupt system calls every few milliseconds."""
    began = time.monotonic()

    def handler(*_: object) -> None:
        if time.monotonic() > began + 10.0:
            raise TimeoutError

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with closing(Connection("tcp://127.0.0.1:1")) as connection:
            assert connection.receive_soon() is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
