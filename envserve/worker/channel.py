"""What pool and worker say to each other over a socket pair.

Every message is a header (kind, block, sequence number, payload length) and a payload
in `codec`'s encoding. A step is one header; its rows are in the slab.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from envserve.errors import UnknownEnv, WorkerError, WrapperError
from envserve.settings import EnvRequest

__all__ = [
    "HEADER",
    "MAX_ANSWER_BYTES",
    "MAX_CALL_BYTES",
    "REFUSALS",
    "BuildMessage",
    "Channel",
    "ChannelMessage",
    "Kind",
    "MessageDecoder",
    "MessageReader",
    "pack_message",
]

#: Kind, block, sequence number, bytes of payload.
HEADER: Final = struct.Struct("<BxHII")
#: More than the longest report of the template; others may come in pieces.
_MAX_READ_BYTES: Final = 1 << 18
#: The other side reads too slowly, as opposed to: it is gone.
_FULL: Final = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}

#: Longest encoding of a call's arguments, and of the value that it has for a row.
MAX_CALL_BYTES: Final = 32 << 20
#: Longest answer to a call of all rows of a block; also with a report: `max_report`.
MAX_ANSWER_BYTES: Final = MAX_CALL_BYTES + (8 << 20)


class Kind(enum.IntEnum):
    """Kinds of messages."""

    # Pool to worker.
    BUILD = 1  # what envs to build; answered by READY or FAILED
    SLAB = 2  # carries the slab's descriptor; not answered
    STEP = 3  # of a block; answered by DONE
    RESET = 4  # of rows of a block; answered by DONE
    CALL = 5  # attribute access on an env; answered by DONE
    CLOSE = 6  # close the envs and exit
    REPLAY = 14  # in place of BUILD: apply what a file holds; see `replay_worker`
    # Worker to pool.
    BUILT = 7  # one more env is built
    READY = 8  # all are; carries their spaces
    DONE = 9  # the block's rows are written
    FAILED = 10  # traceback; the worker exits, as others would if block is 1
    VIDEO_FRAME = 17  # of REPLAY: frames per second, and what the env has rendered
    UNKNOWN_ENV = 11  # message; the worker exits
    BAD_WRAPPER = 15  # message; the worker exits
    # Between launcher and template.
    FORK = 16  # what to import, fork or kill, and what has become of that


#: Errors of the request, which every worker would raise; by the kind that reports them.
REFUSALS: Final = {Kind.UNKNOWN_ENV: UnknownEnv, Kind.BAD_WRAPPER: WrapperError}
_KINDS: Final = {int(kind): kind for kind in Kind}
#: Longest payload of a message, unless it is one of those below.
_MAX_BYTES: Final = 64 << 20
#: What workers say is read in the loop that serves all.
_MAX_BYTES_OF: Final = {
    Kind.READY: 16 << 20,
    Kind.DONE: MAX_ANSWER_BYTES,
    **dict.fromkeys([Kind.BUILT, Kind.FAILED, *REFUSALS], 128 << 10),
}
_NEW: Final = tuple.__new__


class ChannelMessage(NamedTuple):
    """A message that was read."""

    kind: Kind
    block: int
    sequence: int
    payload: bytes


def pack_message(
    kind: int, block: int = 0, sequence: int = 0, payload: bytes = b""
) -> bytes:
    """Returns the bytes of a message."""
    return HEADER.pack(kind, block, sequence, len(payload)) + payload


@dataclass(frozen=True, kw_only=True)
class BuildMessage(EnvRequest):
    """Content of BUILD: the envs of a worker. The pool has checked all of it."""

    max_infos_kib: int
    """Limit of a row's infos in KiB."""
    num_workers: int
    """Number of workers of the pool."""
    worker: int
    """Index of this worker among them."""
    blocks: Sequence[tuple[int, int, int]]
    """Index, first row, and row after the last of each block."""
    incarnations: Sequence[int]
    """For each row of the pool, how often its env has been rebuilt before."""

    def __post_init__(self) -> None:
        """Check nothing: to resolve the types would delay every start of a worker."""


class MessageDecoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ChannelMessage]:
        """Return the messages that are complete; raise WorkerError for other bytes."""
        buffer = self._buffer
        if not buffer and len(data) == HEADER.size:
            code, block, sequence, length = HEADER.unpack(data)
            if length == 0 and code in _KINDS:  # the usual case, without a call
                return [_NEW(ChannelMessage, (_KINDS[code], block, sequence, b""))]
        buffer += data
        messages = []
        offset = 0
        while len(buffer) - offset >= HEADER.size:
            code, block, sequence, length = HEADER.unpack_from(buffer, offset)
            kind = _KINDS.get(code)
            limit = _MAX_BYTES if kind is None else _MAX_BYTES_OF.get(kind, _MAX_BYTES)
            if kind is None or length > limit:
                raise WorkerError(
                    f"expected a message of a known kind below {limit} bytes; "
                    f"got kind {code} of {length} bytes"
                )
            start = offset + HEADER.size
            if len(buffer) < start + length:
                break
            offset = start + length
            messages.append(
                ChannelMessage(kind, block, sequence, bytes(buffer[start:offset]))
            )
        del buffer[:offset]
        return messages


_Passed = int | socket.socket | None


class Channel:
    """The owner's end of a socket pair, to a worker or to the template.

    Nothing but `wait` waits.

    Attributes:
      socket: The socket.
      is_at_end: Whether the other side has closed, and all that it sent was read.
      unsent: What waits until the other side has read more, for `flush`.
    """

    def __init__(
        self,
        end: socket.socket,
        selector: selectors.BaseSelector | None = None,
        owner: object = None,
    ) -> None:
        """Takes this end.

        A selector wakes its owner when there is something to `read`, or room to send.
        """
        end.setblocking(False)
        self.socket = end
        self.is_at_end = False
        self.unsent: deque[tuple[bytes, _Passed]] = deque()
        self._reader = MessageDecoder()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._selector = selector
        self._owner = owner
        if selector is not None:
            selector.register(end, selectors.EVENT_READ, owner)

    def send(self, data: bytes, passed: _Passed = None) -> None:
        """Sends messages, without waiting, and maybe a descriptor with them.

        A socket that is passed is closed once it is sent.
        """
        if not self.unsent and passed is None:
            try:
                sent = self.socket.send(data)
            except OSError:  # full, or at its end: `flush` tells which
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self.unsent.append((data, passed))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now; the selector tells when it takes more."""
        while self.unsent:
            data, passed = self.unsent[0]
            fd = passed.fileno() if isinstance(passed, socket.socket) else passed
            try:
                sent = socket.send_fds(self.socket, [data], [] if fd is None else [fd])
            except OSError as error:
                if error.errno not in _FULL:
                    # It has ended. What it wrote before can be read, up to its end.
                    self._drop_unsent()
                break
            if isinstance(passed, socket.socket):
                passed.close()
            self.unsent[0] = data[sent:], None
            if sent == len(data):
                self.unsent.popleft()
        if self._selector is not None and not self.is_at_end:
            events = selectors.EVENT_READ
            if self.unsent:
                events |= selectors.EVENT_WRITE
            self._selector.modify(self.socket, events, self._owner)

    def read(self) -> list[ChannelMessage]:
        """Returns the messages that have come; sends what is left to.

        Raises:
          WorkerError: What has come is no message.
        """
        if self.unsent:
            self.flush()
        try:
            data = self.socket.recv(_MAX_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if data:
            return self._reader.feed(data)
        if not self.is_at_end:
            self._unregister()  # else it stays readable
            self.is_at_end = True
        return []

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `read` has something, or can send what is left to."""
        events = select.POLLIN | (select.POLLOUT if self.unsent else 0)
        self._poll.modify(self.socket, events)
        self._poll.poll(math.ceil(1000 * timeout_seconds))

    def close(self) -> None:
        """Closes this end."""
        self._drop_unsent()
        if not self.is_at_end:
            self._unregister()
        self.socket.close()

    def _drop_unsent(self) -> None:
        for _, passed in self.unsent:
            if isinstance(passed, socket.socket):
                passed.close()
        self.unsent.clear()

    def _unregister(self) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):  # an interrupt may have come between
                self._selector.unregister(self.socket)


class MessageReader:
    """What the pool sends, as a worker reads it.

    Attributes:
      fds: Descriptors that have come.
      spin_seconds: How long to poll for a message, yielding the core, before sleeping.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.fds: list[int] = []
        self.spin_seconds = 0.0
        self._channel = channel

    def messages(self) -> Iterator[ChannelMessage]:
        """Yields messages until the pool closes its end."""
        reader = MessageDecoder()
        has_slab = False
        while True:
            if has_slab:
                data = self._receive()
            else:
                data, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
                self.fds += fds
                has_slab = bool(fds)
            if not data:
                return
            yield from reader.feed(data)

    def _receive(self) -> bytes:
        give_up_at = time.perf_counter() + self.spin_seconds
        while time.perf_counter() < give_up_at:
            try:
                return self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return self._channel.recv(1 << 16)
