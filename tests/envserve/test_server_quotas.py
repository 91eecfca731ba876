"""Quotas and fair shares on a real server: no user can exhaust others' resources."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.wire.bodies import Attach
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, decode, encode
from envserve.wire.sockets import use_keys
from tests.envserve.conftest import Join, Serve, WaitUntil
from tests.envserve.server_process import ServerProcess
from tests.envserve.test_metrics_port import current_samples
from tests.envserve.zmtp_peers import HELLO, OneShotDealer, honest_client

OPENINGS = ("--metrics-port", "0", "--drain-grace", "0", "--allow-kwarg", "length")


class KeyedPeer:
    """A DEALER socket with a key, which sends arbitrary messages."""

    def __init__(self, server: ServerProcess, public: bytes, pair: KeyPair) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        use_keys(self._socket, public, pair)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        # While replies wait for this limit, libzmq reads nothing, and does not notice
        # that the server closes the connection because of the unread replies.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(server.address)
        self.send(MessageType.HELLO, Hello().encode())
        self.boot = self.receive().boot

    def send(self, kind: MessageType, body: bytes, **fields: Any) -> None:
        message = Message(kind, request=1, body=body, **fields)
        self._socket.send_multipart(encode(message))

    def attach(
        self, sessions: Iterable[int], env_name: str = "CartPole-v1", **more: Any
    ) -> None:
        """Request envs (default: one) for each of these sessions."""
        options = {"num_envs": 1, "seed": 1, **more}
        body = Attach(env_name=env_name, **options).encode()
        for session in sessions:
            self.send(MessageType.ATTACH, body, session=session, boot=self.boot)

    def flood(self, data: bytes) -> None:
        for _ in range(8):
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self) -> Message:
        return decode(self._socket.recv_multipart())

    def granted(self) -> Message:
        """Wait until a lease is granted."""
        while (reply := self.receive()).type is not MessageType.GRANTED:
            pass
        return reply

    def errors(self, count: int, sessions: Iterable[int] = ()) -> list[ErrorBody]:
        """Wait until `count` sessions were rejected; resend requests as clients do."""
        errors: dict[int, ErrorBody] = {}
        while len(errors) < count:
            # A throttled user's messages are dropped, so resend them.
            if sessions and not self._socket.poll(1000):
                self.attach(set(sessions) - errors.keys())
            reply = self.receive()
            if reply.type is MessageType.ERROR:
                errors[reply.session] = ErrorBody.decode(reply.body)
        return [*errors.values()]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFolder:
    """The key folder for this test's servers."""
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "home"))
    folder = KeyFolder()
    folder.ensure_key("server")
    return folder


PAIR = KeyPair.generate()


def start(
    serve: Serve, folder: KeyFolder, *options: str, **grant: object
) -> ServerProcess:
    """Start a server that gives mallory's key this grant."""
    mallory = Grant(name="mallory", public=PAIR.public, **grant)  # type: ignore[arg-type]
    folder.ensure_key("client")
    folder.clients.add(mallory, time.time())
    return serve(*options)


@pytest.fixture
def mallory(folder: KeyFolder) -> Iterator[list[KeyedPeer]]:
    peers: list[KeyedPeer] = []
    yield peers
    for peer in peers:
        peer.close()


def connect(server: ServerProcess, folder: KeyFolder) -> KeyedPeer:
    keys = folder.key("server")
    assert keys is not None
    return KeyedPeer(server, keys.public, PAIR)


def counter(server: ServerProcess, short: str) -> Callable[[], float]:
    """Return a function that reads one of the server's metrics."""
    address = server.metrics_address
    return lambda: current_samples(address).get(f"envserve_{short}", 0.0)


def test_a_user_who_attaches_without_end_leaves_processes_to_others(
    serve: Serve, join: Join, folder: KeyFolder, mallory: list[KeyedPeer]
) -> None:
    server = start(serve, folder, "--max-processes", "8")
    mallory.append(peer := connect(server, folder))
    peer.attach(range(1, 129))
    errors = peer.errors(128 - 6, range(1, 129))
    began = time.monotonic()
    client = join(server, 4)
    assert client.session.error is None
    assert time.monotonic() - began < 20.0
    assert {error.code for error in errors} == {ErrorCode.ENVS_BUSY}
    (text,) = {error.text for error in errors}
    assert text.startswith("mallory uses 6 of its 6 processes and requested ")
    assert len(server.worker_pids) <= 8


def test_the_audit_log_has_grants_and_rejections_of_a_key(
    serve: Serve, folder: KeyFolder, mallory: list[KeyedPeer], tmp_path: Path
) -> None:
    file = tmp_path / "audit"
    options = ("--audit", str(file), "--log-level", "error")
    server = start(serve, folder, *options, envs=("CartPole-*",), max_envs=1)
    mallory.append(peer := connect(server, folder))
    peer.attach(range(1, 2))
    peer.granted()
    peer.attach(range(2, 3))
    (error,) = peer.errors(1)
    assert error.text.startswith("mallory uses 1 of its 1 envs and requested ")
    peer.attach(range(3, 4), "Acrobot-v1")
    (error,) = peer.errors(1)
    assert error.text.startswith(
        "mallory may use CartPole-*, but requested Acrobot-v1; "
    )
    peer.send(MessageType.DETACH, b"", session=1, boot=peer.boot)
    while peer.receive().type is not MessageType.DETACHED:
        pass
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["event"], one["env"], one["count"]) for one in lines] == [
        ("attached", "CartPole-v1", 1),
        ("over quota", "CartPole-v1", 1),
        ("refused", "Acrobot-v1", 1),
        ("ended", "CartPole-v1", 1),
    ]
    assert {(one["name"], one["address"]) for one in lines} == {
        ("mallory", "127.0.0.1")
    }
    assert all(one["fingerprint"] for one in lines)
    assert file.stat().st_mode & 0o777 == 0o600


def test_messages_beyond_a_user_s_share_are_dropped_and_counted(
    serve: Serve,
    folder: KeyFolder,
    mallory: list[KeyedPeer],
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    audit = tmp_path / "audit"
    options = (*OPENINGS, "--audit", str(audit))
    server = start(serve, folder, *options, share=1000)
    mallory.append(peer := connect(server, folder))

    def is_over() -> bool:
        for _ in range(10_000):
            peer.send(MessageType.PING, b"", boot=peer.boot)
        return '"event": "over quota"' in audit.read_text()

    with honest_client(server):
        assert not any(is_over() for _ in range(3))
        small_share = Grant(name="mallory", public=PAIR.public, share=0.01)
        folder.clients.add(small_share, time.time())
        while not is_over():
            pass
    count = counter(server, "dropped_messages_total")
    wait_until(lambda: count() > 0)


def test_a_user_who_floods_with_invalid_messages_is_blocked(
    serve: Serve, folder: KeyFolder, mallory: list[KeyedPeer], wait_until: WaitUntil
) -> None:
    server = start(serve, folder, *OPENINGS)
    mallory.append(peer := connect(server, folder))

    def is_shut_out() -> bool:
        with contextlib.suppress(zmq.Again):
            peer.flood(bytes(1 << 20))
        return "a flood, by mallory; mallory is rejected for 60 s" in server.log

    with honest_client(server) as client:
        while not is_shut_out():
            time.sleep(0.002)  # leave the cores to the server
        num_steps = len(client.seconds)
        wait_until(lambda: len(client.seconds) > num_steps + 10)
    assert counter(server, "reopened_total")() == 1
    keys = folder.key("server")
    assert keys is not None
    with OneShotDealer(server.address, keys.public, PAIR, [b""]) as again:
        assert not again.is_admitted()


@pytest.mark.parametrize("option", ["expires", "until"])
def test_a_client_with_an_expired_key_is_rejected_and_counted(
    serve: Serve, folder: KeyFolder, wait_until: WaitUntil, option: str
) -> None:
    server = start(serve, folder, *OPENINGS, **{option: time.time() - 1.0})
    keys = folder.key("server")
    assert keys is not None
    with OneShotDealer(server.address, keys.public, PAIR, HELLO) as late:
        assert not late.is_admitted()
    count = counter(server, "refused_keys_total")
    wait_until(lambda: count() == 1)
