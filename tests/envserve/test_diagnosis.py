"""The diagnosis of failed connections: findings, errors, and sent data."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zmq

from envserve.client.link import sessionless_requests
from envserve.client.link.connection import Connection
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.zmq_guards.diagnosis import (
    Diagnosis,
    Finding,
    connection_error,
    diagnose_connection,
)
from envserve.errors import ConnectError
from envserve.keys.formats import fingerprint
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import CurveKeys, KeyPair
from envserve.session.client.liveness import Timeouts
from tests.envserve.conftest import Serve, WaitUntil
from tests.envserve.server_process import make_config

SERVER, CLIENT, OTHER = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
KEYS: CurveKeys = (SERVER.public, CLIENT)
#: Maximum time in seconds until a lane raises the error, plus slack for a loaded
#: machine.
SECONDS = 3.0
SLACK_SECONDS = 20.0

Listen = Callable[..., "Listener"]


class Listener:
    """A thread with a listening socket, which records the data it receives."""

    def __init__(self) -> None:
        self.address = ""
        self.received: list[bytes] = []  # ZeroMQ messages, or bytes from TCP
        self.is_over = threading.Event()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self._is_ready.wait(20)

    def _serve(self) -> None:
        raise NotImplementedError

    def _be_ready(self, port: int) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        self._is_ready.set()

    def close(self) -> None:
        self.is_over.set()
        self._thread.join()


class Router(Listener):
    """A ROUTER, either without keys or with keys and a ZAP handler."""

    def __init__(self, pair: KeyPair | None = None, status: bytes = b"200") -> None:
        self._pair, self._status = pair, status
        super().__init__()

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        handler, router = context.socket(zmq.REP), context.socket(zmq.ROUTER)
        handler.bind("inproc://zeromq.zap.01")
        if self._pair is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
            router.setsockopt(zmq.ZAP_DOMAIN, b"test")
        self._be_ready(router.bind_to_random_port("tcp://127.0.0.1"))
        poller = zmq.Poller()
        poller.register(handler, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        while not self.is_over.is_set():
            readable = dict(poller.poll(50))
            if handler in readable:
                _, number, *_ = handler.recv_multipart()
                reply = [b"1.0", number, self._status, b"", b"user", b""]
                handler.send_multipart(reply)
            if router in readable:
                self.received.append(router.recv_multipart()[1])
        context.destroy(linger=0)


class Publisher(Listener):
    """A ZeroMQ socket of an unrelated program."""

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        publisher = context.socket(zmq.PUB)
        self._be_ready(publisher.bind_to_random_port("tcp://127.0.0.1"))
        self.is_over.wait()
        context.destroy(linger=0)


class Tcp(Listener):
    """A TCP port that replies to data with a function's result; None disconnects."""

    def __init__(self, reply: Callable[[bytes], bytes | None]) -> None:
        self._reply = reply
        super().__init__()

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.settimeout(0.02)
            self._be_ready(server.getsockname()[1])
            streams: list[socket.socket] = []
            while not self.is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    streams.append(stack.enter_context(server.accept()[0]))
                    streams[-1].settimeout(0.02)
                for stream in list(streams):
                    with contextlib.suppress(TimeoutError):
                        if not self._reply_to(stream):
                            streams.remove(stream)
                            stream.close()

    def _reply_to(self, stream: socket.socket) -> bool:
        """Reply to the received data; return whether to keep the connection open."""
        try:
            part = stream.recv(4096)
        except ConnectionError:
            return False
        self.received.append(part)
        reply = self._reply(part)
        if not part or reply is None:
            return False
        stream.sendall(reply)
        return True


@pytest.fixture
def listen() -> Iterator[Listen]:
    with contextlib.ExitStack() as stack:

        def start(kind: Any, *arguments: Any) -> Listener:
            return stack.enter_context(contextlib.closing(kind(*arguments)))

        yield start


def echo(part: bytes) -> bytes:
    return part


def nothing(_: bytes) -> bytes:
    return b""


def hang_up(_: bytes) -> None:
    return None


def web(_: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n"


def web_of_lines(part: bytes) -> bytes:
    return web(part) if b"\n" in part else b""


FOREIGN = (
    "a ZeroMQ socket of another program listens there; is `envserve start` running "
    "there, on that port?"
)
#: By name: the listener, the client's keys, the finding, and part of the error.
CASES: dict[str, tuple[tuple[Any, ...], CurveKeys | None, Finding, str]] = {
    "its own": ((Router, SERVER), KEYS, Finding.OK, ""),
    "no keys, as agreed": ((Router,), None, Finding.OK, ""),
    "no keys": (
        (Router,),
        KEYS,
        Finding.USES_NO_KEYS,
        "the server uses no keys, but this client requires them; start it without "
        "--insecure-no-auth, or pass insecure=True in a network that you trust",
    ),
    "keys": (
        (Router, SERVER),
        None,
        Finding.NEEDS_KEYS,
        "the server requires keys, but this client connects without them; omit "
        "--insecure (insecure=True)",
    ),
    "refuses": (
        (Router, SERVER, b"400"),
        KEYS,
        Finding.UNKNOWN_CLIENT,
        "the server does not know this client's key "
        f"({fingerprint(CLIENT.public)}): it was never invited, has expired, or was "
        'removed; run "envserve invite NAME --at ADDRESS" there and "envserve join" '
        "here",
    ),
    "another": (
        (Router, OTHER),
        KEYS,
        Finding.OTHER_SERVER,
        "the server does not have the key that it had when you joined (expected "
        f"{fingerprint(SERVER.public)}): it is another server, has a new key, or is a "
        "man in the middle; nothing was sent; if it was set up again, join again: "
        "envserve join --replace",
    ),
    "echo": ((Tcp, echo), KEYS, Finding.NOT_ZEROMQ, "does not speak ZeroMQ"),
    "web": ((Tcp, web), KEYS, Finding.NOT_ZEROMQ, "does not speak ZeroMQ"),
    "web of lines": ((Tcp, web_of_lines), KEYS, Finding.NOT_ZEROMQ, "not speak ZeroMQ"),
    "web in the clear": ((Tcp, web), None, Finding.NOT_ZEROMQ, "does not speak ZeroMQ"),
    "only listens": ((Tcp, nothing), KEYS, Finding.SILENT, "nothing was sent; is"),
    "only listens in the clear": ((Tcp, nothing), None, Finding.SILENT, "not reply"),
    "publishes": ((Publisher,), None, Finding.NOT_A_SERVER, FOREIGN),
    "publishes to all": ((Publisher,), KEYS, Finding.NOT_A_SERVER, FOREIGN),
    "doubts": ((Router, SERVER, b"300"), KEYS, Finding.UNKNOWN, ""),
    "hangs up": ((Tcp, hang_up), KEYS, Finding.UNKNOWN, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_of_a_failed_connection_is_found_and_explained(
    listen: Listen, name: str
) -> None:
    listener, keys, finding, text = CASES[name]
    address = listen(*listener).address
    never_ends = finding in (Finding.NOT_ZEROMQ, Finding.SILENT) or name == "doubts"
    assert diagnose_connection(address, keys, 0.5 if never_ends else 20.0) is finding
    error = connection_error(finding, address, keys)
    if finding in (Finding.NOT_ZEROMQ, Finding.SILENT):
        assert text in str(error)
    elif text:
        assert str(error) == f"{address}: {text.replace('THIS', address)}"
    else:
        assert error is None


def test_a_server_of_another_key_folder_is_not_taken_for_a_server_that_was_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path))
    address = "tcp://127.0.0.1:7000"
    keys = KeyFolder().keys_for(address)
    text = str(connection_error(Finding.OTHER_SERVER, address, keys))
    assert "If you started it with another ENVSERVE_HOME, set it here too" in text
    assert str(tmp_path) in text
    assert "If the key was replaced (envserve keys new), stop the server" in text
    assert "joined" not in text


def test_a_damaged_key_that_is_not_needed_does_not_hide_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path))
    KeyFolder().ensure_key("server")
    (tmp_path / "server.key").write_text("damaged\n")
    error = connection_error(Finding.UNKNOWN_CLIENT, "tcp://sim1:5555", KEYS)
    assert "does not know this client's key" in str(error)


def test_the_reason_is_unknown_if_an_address_is_malformed() -> None:
    assert diagnose_connection("x", KEYS, SECONDS) is Finding.UNKNOWN


@pytest.mark.parametrize("prefix", ["", "@"] if sys.platform == "linux" else [""])
def test_a_refused_connection_is_found(tmp_path: Path, prefix: str) -> None:
    for address in ("tcp://127.0.0.1:1", f"ipc://{prefix}{tmp_path}/nobody"):
        assert diagnose_connection(address, KEYS, SECONDS) is Finding.REFUSED
    with socket.socket(socket.AF_UNIX) as listener:
        # The name of an abstract socket begins with NUL, and its address with @.
        listener.bind(f"{prefix and chr(0)}{tmp_path}/server")
        listener.listen(0)
        address = f"ipc://{prefix}{tmp_path}/server"
        for _ in range(3):  # more connections than fit in its backlog
            assert diagnose_connection(address, KEYS, SECONDS) is Finding.UNKNOWN
    assert diagnose_connection(address, KEYS, SECONDS) is Finding.REFUSED


def test_an_unknown_host_name_is_reported_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    address = "tcp://nobody.invalid:1"
    text = "nobody.invalid:1: cannot resolve the host name"
    with pytest.raises(ConnectError, match=text):
        sessionless_requests.request_welcome(address, 20.0, insecure=True)
    started = time.monotonic()
    lane = RemoteLane(
        address, make_config(), Timeouts(connect_seconds=5.0), insecure=True
    )
    with pytest.raises(ConnectError, match=text):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started >= 5.0


def test_a_request_reports_a_refused_connection() -> None:
    address = "tcp://127.0.0.1:1"
    text = (
        f"{address}: connection refused: no program is listening there; run "
        f"`envserve start --bind {address}` on that host"
    )
    with pytest.raises(ConnectError) as error:
        sessionless_requests.request_welcome(address, 20.0, insecure=True)
    assert str(error.value) == text


def test_the_remedy_opens_a_server_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    error = connection_error(Finding.REFUSED, "tcp://sim1:7000", None)
    assert str(error) == (
        "tcp://sim1:7000: connection refused at tcp://10.0.0.7:7000: no program is "
        "listening there; run `envserve start --bind tcp://0.0.0.0:7000` on that host"
    )


def test_a_lane_logs_a_refused_connection_and_waits_for_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    lane = RemoteLane(
        address, make_config("CartPole-v1"), Timeouts(connect_seconds=300.0)
    )
    has_logged = threading.Event()

    def record(_: logging.LogRecord) -> bool:
        has_logged.set()
        return True

    caplog.handler.addFilter(record)
    with contextlib.closing(lane):
        assert has_logged.wait(60.0)
        serve(bind=(address,))
        lane.finish_start(time.monotonic() + 300.0)
    (line,) = [r.message for r in caplog.records if "refused" in r.message]
    assert line.startswith(f"{address}: connection refused: no program is")
    assert "run `envserve start" not in line
    assert line.endswith("; retrying for up to 300 s")


def test_a_listener_that_does_not_reply_is_reported(listen: Listen) -> None:
    address = listen(Router).address
    with pytest.raises(ConnectError, match=r"within 3 s; another program may"):
        sessionless_requests.request_welcome(address, 3.0, insecure=True)
    with pytest.raises(ConnectError, match=r"no server replied within 0 s$"):
        sessionless_requests.request_welcome(address, 0.0, insecure=True)


# One case per finding that prevents a connection.
@pytest.mark.parametrize("name", ["web", "no keys", "keys", "refuses", "another"])
def test_a_lane_raises_soon_and_has_sent_nothing(
    listen: Listen, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, keys, _, text = CASES[name]
    peer = listen(*listener)
    monkeypatch.setattr(KeyFolder, "keys_for", lambda *_, insecure: keys)
    # An unknown client waits until the timeout, because it may be invited meanwhile.
    connect_seconds = 6.0 if name == "refuses" else 60.0
    lane = RemoteLane(
        peer.address, make_config(), Timeouts(connect_seconds=connect_seconds)
    )
    started = time.monotonic()
    with pytest.raises(ConnectError) as error:
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < SECONDS + SLACK_SECONDS
    assert text.replace("THIS", peer.address) in str(error.value)
    assert keys is None or not any(b"ENVS" in part for part in peer.received)


def test_a_stopped_server_is_reported_only_after_the_timeout(serve: Serve) -> None:
    server = serve()
    server.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        lane = RemoteLane(
            server.address,
            make_config("CartPole-v1"),
            Timeouts(connect_seconds=4.0),
            insecure=server.is_insecure,
        )
        with pytest.raises(ConnectError, match="does not reply: it hangs"):
            lane.finish_start(started + 60.0)
        assert time.monotonic() - started >= 4.0
    finally:
        server.signal(signal.SIGCONT)


def test_the_error_of_an_unknown_key_names_the_listener_and_joined_addresses(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path))
    monkeypatch.setattr("envserve.keys.key_folder.is_local_address", lambda _: False)
    KeyFolder().add_pin(["tcp://127.0.0.1:7", "tcp://10.9.9.9:5555"], b"s" * 32, "ann")
    joined = "; this client has joined tcp://127.0.0.1:7$"
    with pytest.raises(ConnectError, match=f"no key of this server .*{joined}"):
        Connection(listen(Router, SERVER).address)
    with pytest.raises(ConnectError, match=f"the server uses no keys, .*{joined}"):
        Connection(listen(Router).address)
    with pytest.raises(ConnectError, match=f"connection refused at .*{joined}"):
        Connection("tcp://localhost:1")


def test_working_connections_are_not_diagnosed(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "envserve.client.link.zmq_guards.diagnosis.diagnose_connection", pytest.fail
    )
    monkeypatch.setattr(KeyFolder, "keys_for", lambda *_, insecure: KEYS)
    # This is longer than a loaded machine needs to connect.
    monkeypatch.setattr("envserve.client.link.zmq_guards.diagnosis.DELAY_SECONDS", 4.0)
    peer = listen(Router, SERVER)
    lane = RemoteLane(peer.address, make_config(), Timeouts(connect_seconds=6.0))
    with pytest.raises(ConnectError, match="no server replied within 6 s"):
        lane.finish_start(time.monotonic() + 60.0)
    assert peer.received[0].startswith(b"ENVS")


def test_a_process_without_free_descriptors_cannot_diagnose_a_handshake(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = listen(Router, SERVER).address
    failing = mock.Mock(side_effect=zmq.ZMQError(errno.EMFILE))
    monkeypatch.setattr(zmq.Context, "socket", failing)
    found = diagnose_connection(address, KEYS, SLACK_SECONDS)
    monkeypatch.undo()
    assert found is Finding.UNKNOWN
    failing.assert_called()


def test_a_diagnosis_is_repeated_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    diagnosis = Diagnosis("tcp://127.0.0.1:1", None, SECONDS)
    failing = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", failing)
    assert diagnosis.poll(time.monotonic() + SECONDS) is None
    failing.assert_called_once()
    monkeypatch.undo()
    wait_until(lambda: diagnosis.poll(time.monotonic()) is not None, SLACK_SECONDS)
    assert "connection refused" in str(diagnosis.poll(time.monotonic()))
