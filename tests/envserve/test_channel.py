"""Messages between pool and worker are decoded however their bytes are split."""

from __future__ import annotations

import errno
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envserve.errors import WorkerError
from envserve.worker.channel import (
    Channel,
    ChannelMessage,
    MessageDecoder,
    MessageKind,
    pack_message,
)

frames = st.builds(
    ChannelMessage,
    st.sampled_from(MessageKind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=50),
)


@given(st.lists(frames, max_size=8), st.data())
def test_messages_are_decoded_wherever_the_stream_is_cut(
    sent: list[ChannelMessage], data: st.DataObject
) -> None:
    stream = b"".join(pack_message(*frame) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    ends = np.cumsum([len(pack_message(*frame)) for frame in sent])
    reader = MessageDecoder()
    read: list[ChannelMessage] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[start:stop])
        assert len(read) == np.count_nonzero(ends <= stop)  # as soon as complete
    assert read == sent


def test_message_without_payload_is_as_short_as_its_header() -> None:
    assert len(pack_message(MessageKind.STEP, 1, 2)) == 12


@pytest.mark.parametrize("kind", [0, max(MessageKind) + 1, 255])
def test_unknown_kind_is_rejected(kind: int) -> None:
    with pytest.raises(WorkerError, match=f"got kind {kind}"):
        list(MessageDecoder().feed(pack_message(kind)))


def test_message_that_is_too_long_is_rejected_by_its_header() -> None:
    header = bytearray(pack_message(MessageKind.DONE))
    header[-4:] = (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(WorkerError, match="4294967295 bytes"):
        list(MessageDecoder().feed(bytes(header)))


class Full(socket.socket):
    """A socket whose first `sendmsg` finds no room for a descriptor."""

    is_full = True

    def sendmsg(self, *arguments: Any) -> int:
        if self.is_full:
            self.is_full = False
            raise OSError(errno.EMSGSIZE, "Message too long")  # as macOS does
        return super().sendmsg(*arguments)


def test_a_message_is_sent_later_if_there_is_no_room_for_its_descriptor() -> None:
    ours, theirs = socket.socketpair()
    passed, kept = socket.socketpair()
    message = pack_message(MessageKind.FORK, 1, 2)
    with kept, theirs, Full(fileno=ours.detach()) as full:
        channel = Channel(full)
        channel.send(message, passed)
        channel.flush()
        data, (fd,), _, _ = socket.recv_fds(theirs, 100, 1)
        assert data == message
        with socket.socket(fileno=fd) as received, passed:
            kept.send(b"x")
            assert received.recv(1) == b"x"


class Interrupted(socket.socket):
    """A socket whose system calls succeed, before a signal handler raises."""

    def send(self, *arguments: Any) -> int:
        super().send(*arguments)
        raise TimeoutError

    def sendmsg(self, *arguments: Any) -> int:
        super().sendmsg(*arguments)
        raise TimeoutError

    def recv(self, *arguments: Any) -> bytes:
        super().recv(*arguments)
        raise TimeoutError


@pytest.mark.parametrize("is_queued", [False, True])
def test_the_error_of_a_signal_handler_is_not_taken_for_one_of_the_socket(
    is_queued: bool,
) -> None:
    ours, theirs = socket.socketpair()
    message = pack_message(MessageKind.STEP, 1, 2)
    with theirs, Interrupted(fileno=ours.detach()) as interrupted:
        channel = Channel(interrupted)
        if is_queued:
            channel.unsent.append((message, None))
        with pytest.raises(TimeoutError):
            channel.flush() if is_queued else channel.send(message)
        assert theirs.recv(100) == message  # sent once
        theirs.send(message)
        channel.unsent.clear()
        with pytest.raises(TimeoutError):
            channel.read()
        assert not channel.is_at_eof
