"""A trainer that stops reading: what the server keeps for it has a bound."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import pytest
import zmq

from envserve.wire import Attach, Granted, Hello, Message, MessageType, decode, encode
from tests.envserve.conftest import Join, Serve

NUM_ENVS = 8
#: Longer, and rows would be sent from where they are: nothing would be kept.
RESULT_BYTES = NUM_ENVS * 84 * 84 * 4
#: The protocol's limit, the rest of ZeroMQ and of the kernel, and what a server needs.
MAX_REPLIES = 64
MAX_GROWTH_BYTES = MAX_REPLIES * RESULT_BYTES + (16 << 20)
#: Were there no limit, they would take four times that.
NUM_COPIES = 4 * MAX_GROWTH_BYTES // RESULT_BYTES


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unread_replies_do_not_grow_the_server(serve: Serve, join: Join) -> None:
    server = serve("--allow-kwarg", "space", "--drain-grace", "0")
    reader, other = SlowReader(server.address), join(server)
    other.reset()
    reader.send(**reader.step)
    reader.receive(MessageType.RESULT)
    before = server.resident_bytes
    for attempt in range(1, NUM_COPIES + 1):
        reader.send(**reader.step, attempt=attempt)
        if attempt % 50 == 0:
            other.step(1)
    other.step(1)
    assert server.resident_bytes - before < MAX_GROWTH_BYTES
    # It is none the worse for it: what it asks for last is answered.
    reader.send(**reader.step, attempt=NUM_COPIES + 1)
    while reader.receive(MessageType.RESULT).attempt < 2:
        pass
    other.close()
    reader.context.destroy(linger=0)
    lines = server.end(signal.SIGTERM).splitlines()
    (dropped,) = (int(line.split()[3]) for line in lines if "replies could" in line)
    assert dropped > NUM_COPIES // 2
