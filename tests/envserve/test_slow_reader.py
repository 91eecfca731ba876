"""A trainer that stops reading: what the server keeps for it has a bound."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from envserve.wire import (
    Attach,
    Granted,
    Hello,
    Message,
    MessageType,
    decode,
    encode,
)
from tests.envserve.processes import resident_kib
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient

NUM_ENVS = 8
#: Longer, and rows would be sent from where they are: nothing would be kept.
RESULT_BYTES = NUM_ENVS * 84 * 84 * 4
#: The protocol's limit, the rest of ZeroMQ and of the kernel, and what a server needs.
MAX_REPLIES = 64
MAX_GROWTH_KIB = (MAX_REPLIES * RESULT_BYTES >> 10) + (16 << 10)
#: Were there no limit, they would take four times that.
NUM_COPIES = 4 * MAX_GROWTH_KIB * 1024 // RESULT_BYTES


class SlowReader:
    """Asks for more and more copies of a result, and reads when told to."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.SNDHWM, 1)  # what was sent has mostly been read
        self.socket.setsockopt(zmq.SNDTIMEO, 20_000)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(address)
        self._fields: dict[str, Any] = {"session": 8}
        self.send(type=MessageType.HELLO, request=1, body=Hello().encode())
        self._fields["boot"] = self.receive(MessageType.WELCOME).boot
        attach = Attach(
            env_name="envserve/Echo-v0",
            num_envs=NUM_ENVS,
            seed=1,
            env_kwargs={"space": "image"},
        )
        self.send(type=MessageType.ATTACH, request=2, body=attach.encode())
        granted = self.receive(MessageType.GRANTED)
        self._fields["epoch"] = granted.epoch
        blocks = Granted.decode(granted.body, NUM_ENVS).blocks
        entries = tuple((block.index, 1) for block in blocks)
        self.step: dict[str, Any] = {
            "type": MessageType.STEP,
            "request": 3,
            "entries": entries,
            "payload": np.full(RESULT_BYTES, 7, np.uint8).tobytes(),
        }

    def send(self, **fields: Any) -> None:
        self.socket.send_multipart(encode(Message(**self._fields, **fields)))

    def receive(self, kind: MessageType) -> Message:
        while True:
            message = decode(self.socket.recv_multipart())
            if message.type is kind:
                return message


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--allow-kwarg", "space", "--drain-grace", "0")
    with ServerProcess(tmp_path, *options) as server:
        yield server


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_replies_that_nobody_reads_do_not_grow_the_server(
    server: ServerProcess,
) -> None:
    reader = SlowReader(server.address)
    with SessionClient(server.address) as other:
        other.reset()
        reader.send(**reader.step)
        reader.receive(MessageType.RESULT)
        before = resident_kib(server.process.pid)
        for attempt in range(1, NUM_COPIES + 1):
            reader.send(**reader.step, attempt=attempt)
            if attempt % 50 == 0:
                other.step(1)
        other.step(1)
        assert resident_kib(server.process.pid) - before < MAX_GROWTH_KIB
        # It is none the worse for it: what it asks for last is answered.
        reader.send(**reader.step, attempt=NUM_COPIES + 1)
        while reader.receive(MessageType.RESULT).attempt < 2:
            pass
        other.close()
    reader.context.destroy(linger=0)
    server.process.terminate()
    log = server.end()
    (dropped,) = (
        int(line.split()[3]) for line in log.splitlines() if "replies could not" in line
    )
    assert dropped > NUM_COPIES // 2
