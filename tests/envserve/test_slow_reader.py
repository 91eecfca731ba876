"""A server buffers a bounded number of replies for a client that stops reading."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq

from envserve.wire.bodies import Attach, Granted, ResetBody
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, decode, encode
from envserve.wrappers.specs import WrapperSpec
from tests.envserve.conftest import Join, Serve
from tests.envserve.server_process import ServerProcess, use_user_keys

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

NUM_ENVS = 4
MIB = 1 << 20
#: Maximum growth of the server's memory for other reasons: ZeroMQ and the kernel.
SLACK_BYTES = 16 * MIB
#: Maximum number of short replies that the server buffers for a client.
MAX_REPLIES = 64
SESSION = 8
#: Size in bytes of an observation, and of an action; both are images.
IMAGE_BYTES = 84 * 84 * 4


class SlowReader:
    """A client with two connections, which never reads from one of them."""

    def __init__(self, server: ServerProcess, wrappers: Any) -> None:
        self._server = server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mute, self._reading = self._connect(), self._connect()
        self._fields: dict[str, Any] = {"session": SESSION}
        self._send(self._reading, type=MessageType.HELLO, body=Hello().encode())
        self._fields["boot"] = self.receive(MessageType.WELCOME).boot
        attach = Attach(
            env_name="envserve/Echo-v0",
            num_envs=NUM_ENVS,
            seed=1,
            env_kwargs={"space": "image"},
            wrappers=wrappers,
        )
        self._send(self._reading, type=MessageType.ATTACH, body=attach.encode())
        granted = self.receive(MessageType.GRANTED)
        self._fields["epoch"] = granted.epoch
        self.blocks = Granted.decode(granted.body, NUM_ENVS).blocks
        self.seq = 0

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 1 << 16)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        use_user_keys(socket, self._server.address)
        socket.connect(self._server.address)
        return socket

    def _send(self, socket: zmq.Socket[bytes], **fields: Any) -> None:
        socket.send_multipart(encode(Message(**self._fields, **fields)))

    def receive(self, kind: MessageType) -> Message:
        """Receive on the reading connection until a message of this type arrives."""
        while True:
            message = decode(self._reading.recv_multipart())
            if message.type is kind:
                return message

    def request(
        self, kind: MessageType, seq: int, attempt: int = 0, *, reads: bool = False
    ) -> None:
        """Send a RESET or STEP for all blocks; by default, never read the reply."""
        resets = ResetBody(resets=((None, None),) * len(self.blocks)).encode()
        self._send(
            self._reading if reads else self._mute,
            type=kind,
            request=100 + seq,
            attempt=attempt,
            entries=self._entries(seq),
            body=resets if kind is MessageType.RESET else b"",
            payload=bytes(NUM_ENVS * IMAGE_BYTES) if kind is MessageType.STEP else b"",
        )

    def _entries(self, seq: int) -> tuple[tuple[int, int], ...]:
        return tuple((block.index, seq) for block in self.blocks)

    def do(self, kind: MessageType) -> None:
        """Send the next request, and wait until it is done; do not read the reply."""
        self.seq += 1
        for number in itertools.count():
            # Resend, because the server disconnects peers that do not read for 3 s.
            if number % 100 == 0:
                self.request(kind, self.seq)
            entries = self._entries(self.seq + 1)  # the next step, without actions
            self._send(self._reading, type=MessageType.STEP, entries=entries)
            reply = ErrorBody.decode(self.receive(MessageType.ERROR).body)
            if reply.code is not ErrorCode.GAP:  # the request has been executed
                assert "expected 112896 bytes of actions" in reply.text
                return

    def reconnect(self) -> Message:
        """Close the unread connection, and resend the last request every second."""
        self._mute.close(linger=0)
        for attempt in range(1, 20):
            self.request(MessageType.STEP, self.seq, attempt, reads=True)
            if self._reading.poll(1000):
                return decode(self._reading.recv_multipart())
        raise AssertionError("expected a reply to one of 19 copies; got none")

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def read_slowly(serve: Serve) -> Iterator[Callable[..., tuple[SlowReader, Any]]]:
    with ExitStack() as stack:

        def begin(stack_size: int, length: int) -> tuple[SlowReader, ServerProcess]:
            server = serve("--drain-grace", "0", "--allow-kwarg", "space:any")
            frames = WrapperSpec("FrameStackObservation", {"stack_size": stack_size})
            limit = WrapperSpec("TimeLimit", {"max_episode_steps": length})
            reader = stack.enter_context(closing(SlowReader(server, (frames, limit))))
            reader.do(MessageType.RESET)
            return reader, server

        yield begin


Begin = Callable[..., tuple[SlowReader, ServerProcess]]


def test_the_number_of_unread_short_replies_is_bounded(
    read_slowly: Begin, join: Join
) -> None:
    reply_bytes = NUM_ENVS * IMAGE_BYTES * 2
    assert reply_bytes < 256 << 10  # so it counts as a short reply
    reader, server = read_slowly(2, length=1000)
    other = join(server)
    other.reset()
    before = server.resident_bytes
    for number in range(2 * MAX_REPLIES):
        reader.do(MessageType.STEP)
        if number % 50 == 0:
            other.step(1)
    assert server.resident_bytes - before < MAX_REPLIES * reply_bytes + SLACK_BYTES
    other.close()


def test_copies_of_a_large_reply_are_sent_once_a_second(
    read_slowly: Begin, join: Join
) -> None:
    reader, server = read_slowly(64, length=1)
    reader.do(MessageType.STEP)  # ends an episode, so each copy is built again
    other = join(server)
    other.reset()
    before = server.resident_bytes
    for attempt in range(1, 63):
        reader.request(MessageType.STEP, reader.seq, attempt)
    reader.do(MessageType.STEP)  # afterwards, all earlier copies have been handled
    other.step(1)
    assert server.resident_bytes - before < 80 * MIB
    other.close()


def test_the_bytes_of_unread_large_replies_are_bounded(read_slowly: Begin) -> None:
    reply_bytes = 2 * NUM_ENVS * IMAGE_BYTES * 64  # including final observations
    reader, server = read_slowly(64, length=1)
    reader.do(MessageType.STEP)  # touches the whole slab, so it counts as memory
    before = server.resident_bytes
    for _ in range(25):
        reader.do(MessageType.STEP)
    most = 64 * MIB + reply_bytes + SLACK_BYTES
    assert server.resident_bytes - before < most < 25 * reply_bytes // 2
    # After closing the unread connection, the client gets its reply.
    reply = reader.reconnect()
    assert len(reply.payload) == reply_bytes
