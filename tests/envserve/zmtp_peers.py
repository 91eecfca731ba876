"""Peers that send hand-made ZMTP, and an honest client that steps at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from envserve.client.link.remote_lane import RemoteLane
from envserve.keys.key_pair import KeyPair
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Hello
from envserve.wire.message import Buffer, Message, encode
from envserve.wire.sockets import use_keys
from tests.envserve.pool_driver import attach_lane, step
from tests.envserve.server_process import ServerProcess
from tests.oracle.ledger_env import ledger_hash

#: Number of frames that a peer sends in one call.
_CHUNK = 1 << 16
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(52, b"\0")
_KEYED_GREETING = _GREETING.replace(b"NULL\0", b"CURVE")
_MORE, _LONG, _COMMAND = 1, 2, 4
#: The command that follows the greeting if the mechanism has no keys.
KEYLESS_COMMANDS = {
    "NULL": b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "PLAIN": b"\x05HELLO\x03ann\x03ann",
    "GSSAPI": b"\x08INITIATE\0\0\0\x05token",
}
#: A client's first message.
HELLO = encode(Message(MessageType.HELLO, body=Hello().encode()))


def predicted_ids(count: int) -> list[bytes]:
    """Return the routing ids that a server assigns if it does not seed `rand()`."""
    libc = ctypes.CDLL(None)
    libc.srand(1)  # the state in a process that never calls srand
    first = libc.rand()
    return [b"\0" + (first + number).to_bytes(4, "big") for number in range(count)]


class ZmtpPeer:
    """A TCP connection that sends hand-made ZMTP."""

    def __init__(
        self,
        address: str,
        routing_id: bytes | None = b"",
        timeout_seconds: float = 20.0,
    ) -> None:
        """Connect, and greet with a routing id, if any.

        Raises:
          ConnectionError: The server has closed the connection, because it uses keys.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_seconds)
        self._has_greeted = routing_id is not None
        if routing_id is not None:
            try:
                self._greet(routing_id)
            except OSError:
                self.socket.close()
                raise

    def _greet(self, routing_id: bytes) -> None:
        self.socket.sendall(greeting_of(b"DEALER", routing_id))
        received = b""
        while b"READY" not in received:  # data before READY would break the handshake
            if not (data := self.socket.recv(256)):
                raise ConnectionError("the server has closed the connection")
            received += data

    def send_half(self) -> None:
        """Send the first half of a frame, or of the greeting if it was not sent."""
        half = _frame(bytes(1000))[:500] if self._has_greeted else _GREETING[:40]
        self.socket.sendall(half)

    def begin_handshake(self) -> None:
        """Send only the greeting of a client with a key."""
        self.socket.sendall(_KEYED_GREETING)

    def greet_with(self, mechanism: str) -> None:
        """Send everything that ZMTP 3.1 allows before the server's reply."""
        version = b"\x03\x01" + mechanism.encode().ljust(52, b"\0")
        with contextlib.suppress(ConnectionError):  # the server may have disconnected
            self.socket.sendall(
                _SIGNATURE + version + _frame(KEYLESS_COMMANDS[mechanism], _COMMAND)
            )

    def is_admitted(self) -> bool:
        """Return whether the server sends more than a greeting before disconnecting."""
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(256):
                num_bytes += len(data)
                if num_bytes > len(_GREETING):
                    return True
        return False

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        *parts, last = frames
        whole = b"".join(_frame(part, _MORE) for part in parts) + _frame(last)
        self.socket.sendall(whole)

    def send_unfinished(self, count: int) -> None:
        """Send `count` empty frames of an endless message."""
        for _ in range(0, count, _CHUNK):
            self.socket.sendall(_frame(b"", _MORE) * _CHUNK)

    def is_disconnected(self) -> bool:
        """Return whether the server has closed the connection."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        try:
            while poller.poll(0):
                if not self.socket.recv(1 << 16):
                    return True
        except ConnectionError:
            return True
        return False

    def wait_until_disconnected(self) -> None:
        """Read until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def greeting_of(kind: bytes, routing_id: bytes = b"") -> bytes:
    """Return the greeting and READY command of a keyless socket of this type."""
    properties = _property(b"Socket-Type", kind) + _property(b"Identity", routing_id)
    return _GREETING + _frame(b"\x05READY" + properties, _COMMAND)


def more_frames(size: int, count: int) -> bytes:
    """Return `count` frames of an endless message."""
    return _frame(bytes(size), _MORE) * count


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _frame(data: bytes, flags: int = 0) -> bytes:
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | _LONG]) + len(data).to_bytes(8, "big") + data


class OneShotDealer:
    """A DEALER that connects once, with a key that the server may not know."""

    def __init__(
        self, address: str, server: bytes, pair: KeyPair, frames: Sequence[Buffer]
    ) -> None:
        """Connect and send a message; `server` is the expected key of the server."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        use_keys(self.socket, server, pair)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(events)
        self.socket.connect(address)
        with contextlib.suppress(zmq.Again):  # it may already be refused
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def is_admitted(self) -> bool:
        """Wait until the handshake has ended; return whether it has succeeded."""
        assert self._monitor.poll(20_000), "expected the handshake to end within 20 s"
        event = recv_monitor_message(self._monitor)["event"]
        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()


class HonestClient:
    """A client that steps ledger envs and checks every row.

    Attributes:
      lane: The lane to its envs, which have just been reset.
      seconds: Durations of all steps.
    """

    def __init__(self, lane: RemoteLane) -> None:
        self.lane = lane
        self.seconds: list[float] = []
        self._hash = 0

    def step(self, action: int) -> None:
        started = time.monotonic()
        for outcome in step(self.lane, action):
            assert outcome.error is None
            assert not outcome.faults
        self.seconds.append(time.monotonic() - started)
        self._hash = ledger_hash(self._hash, action)
        observed = self.lane.rows.observation[0][:, 3]
        np.testing.assert_array_equal(observed, [self._hash] * self.lane.num_envs)


@contextlib.contextmanager
def honest_client(server: ServerProcess) -> Iterator[HonestClient]:
    """Step in a background thread; the server needs `--allow-kwarg length`."""
    lane = attach_lane(server, env_kwargs={"length": 10**6})
    client, is_over = HonestClient(lane), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not is_over.is_set():
                client.step(len(client.seconds) % 7)
                time.sleep(0.002)  # leave the cores to the other peers
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    with contextlib.closing(lane):
        thread.start()
        try:
            yield client
        finally:
            is_over.set()
            thread.join()
        assert not failures, failures
