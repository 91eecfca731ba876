"""The messages between the pool, its workers and the template, over socket pairs.

A message is a header (kind, block, sequence number, payload length) and a payload in
`codec`'s encoding. STEP and its DONE are usually headers only, because the rows are in
the slab.

The parent's end (`Channel`) does not block, because one loop serves all workers: unsent
bytes are queued, and the selector reports when the socket is writable. The worker's end
(`MessageReader`) blocks, because a worker has nothing else to do between operations.
The parent does not trust workers, because their envs may write anything to any
descriptor: every kind of message has a size limit, and invalid bytes raise WorkerError.
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
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from envserve.errors import (
    UnknownEnv,
    WorkerError,
    WrapperError,
    raise_if_from_handler,
)
from envserve.settings import EnvRequest
from envserve.worker import unpatched

if TYPE_CHECKING:  # at runtime, this import would load gymnasium
    from envserve.envs.pickled_code import UserCode

#: Header of a message: kind, block, sequence number, number of payload bytes.
HEADER: Final = struct.Struct("<BxHII")
#: Maximum number of bytes to read at once; larger than any report of the template.
#: Other messages may need several reads.
_MAX_READ_BYTES: Final = 1 << 18
#: Temporary errors of a send: a buffer is full, or the system lacks resources. EMSGSIZE
#: is macOS's error if the buffer lacks room for a descriptor.
_BUSY_ERRNOS: Final = {
    errno.EAGAIN,
    errno.EMSGSIZE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ETOOMANYREFS,
}

#: Maximum encoded size of the arguments of a call, and of its result for one row.
MAX_CALL_BYTES: Final = 32 << 20
#: Maximum size of the reply to a call on all rows of a block; larger than any other
#: report.
MAX_REPLY_BYTES: Final = MAX_CALL_BYTES + (8 << 20)


class MessageKind(enum.IntEnum):
    """Kinds of messages."""

    # Pool to worker.
    BUILD = 1  # the envs to build; reply: READY or FAILED
    SLAB = 2  # passes the descriptor of the slab; no reply
    STEP = 3  # step all rows of a block; reply: DONE
    RESET = 4  # reset rows of a block; reply: DONE
    CALL = 5  # attribute access on rows of a block; reply: DONE
    CLOSE = 6  # close the envs and exit
    REPLAY = 14  # instead of BUILD: replay a repro file; see `replay_worker`
    # Worker to pool.
    IMPORTING = 12  # the module to import next; "" after the last one
    BUILT = 7  # another env is built
    READY = 8  # all envs are built; contains their spaces
    DONE = 9  # the rows of the block are written
    FAILED = 10  # error text; the worker exits; if block is 1, do not restart it
    VIDEO_FRAME = 17  # during REPLAY: frames per second and a rendered frame
    UNKNOWN_ENV = 11  # error message; the worker exits
    BAD_WRAPPER = 15  # error message; the worker exits
    # Between launcher and template, in both directions.
    FORK = 16  # a request (import modules, fork or kill a worker) or its result


#: Maps the kinds of messages that report an invalid request to exceptions. A restart
#: cannot fix such a request.
REQUEST_ERRORS: Final = {
    MessageKind.UNKNOWN_ENV: UnknownEnv,
    MessageKind.BAD_WRAPPER: WrapperError,
}
_KINDS: Final = {int(kind): kind for kind in MessageKind}
#: Maximum payload size of messages whose kind is not in `_MAX_BYTES_BY_KIND`.
MAX_MESSAGE_BYTES: Final = 64 << 20
#: Maximum payload sizes of messages from workers. They are lower than those of messages
#: to workers, because one loop decodes the messages of all workers.
_MAX_BYTES_BY_KIND: Final = {
    MessageKind.READY: 16 << 20,
    MessageKind.DONE: MAX_REPLY_BYTES,
    **dict.fromkeys(
        (MessageKind.IMPORTING, MessageKind.BUILT, MessageKind.FAILED, *REQUEST_ERRORS),
        128 << 10,
    ),
}
_TUPLE_NEW: Final = tuple.__new__


class ChannelMessage(NamedTuple):
    """A decoded message."""

    kind: MessageKind
    block: int
    sequence: int
    payload: bytes


def pack_message(
    kind: int, block: int = 0, sequence: int = 0, payload: bytes = b""
) -> bytes:
    """Encode a message."""
    return HEADER.pack(kind, block, sequence, len(payload)) + payload


@dataclass(frozen=True, kw_only=True)
class BuildMessage(EnvRequest):
    """Content of BUILD: the envs of one worker, already validated by the pool."""

    max_infos_kib: int
    """Maximum size of a row's infos in KiB."""
    num_workers: int
    """Number of workers in the pool."""
    worker: int
    """Index of this worker."""
    gpu: str
    """GPU of this worker, as in CUDA_VISIBLE_DEVICES; "" for all GPUs."""
    blocks: Sequence[tuple[int, int, int]]
    """For each block: its index, its first row, and the row after its last row."""
    incarnations: Sequence[int]
    """For each row of the pool, the number of times that its env was rebuilt before."""
    code: UserCode
    """Functions and classes of the process that owns the pool; pickled in BUILD."""

    def __post_init__(self) -> None:
        """Skip the validation, because resolving the types would delay the start."""


class MessageDecoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ChannelMessage]:
        """Add received bytes, and return the messages that they complete.

        Raises:
          WorkerError: The received bytes are not a valid message.
        """
        buffer = self._buffer
        if not buffer and len(data) == HEADER.size:
            # Fast path for a single message without a payload.
            code, block, sequence, length = HEADER.unpack(data)
            if length == 0 and code in _KINDS:
                return [
                    _TUPLE_NEW(ChannelMessage, (_KINDS[code], block, sequence, b""))
                ]
        buffer += data
        messages = []
        offset = 0
        while len(buffer) - offset >= HEADER.size:
            code, block, sequence, length = HEADER.unpack_from(buffer, offset)
            kind = _KINDS.get(code)
            limit = MAX_MESSAGE_BYTES
            if kind is not None:
                limit = _MAX_BYTES_BY_KIND.get(kind, limit)
            if kind is None or length > limit:
                raise WorkerError(
                    f"expected a message of a known kind, of at most {limit} bytes; "
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


_PassedFd = int | socket.socket | None


class Channel:
    """The parent's end of a socket pair to a worker or the template.

    It is non-blocking: only `wait` blocks.

    Attributes:
      socket: The socket.
      is_at_eof: Whether the peer has closed its end, and everything it sent was read.
      unsent: Queued messages that have not been sent, with the descriptors to pass.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector | None = None,
        selector_data: object = None,
    ) -> None:
        """Take ownership of a socket; register it with the selector, if any."""
        sock.setblocking(False)
        self.socket = sock
        self.is_at_eof = False
        self.unsent: deque[tuple[bytes, _PassedFd]] = deque()
        self._decoder = MessageDecoder()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._selector = selector
        self._selector_data = selector_data
        if selector is not None:
            selector.register(sock, selectors.EVENT_READ, selector_data)

    def send(self, data: bytes, passed_fd: _PassedFd = None) -> None:
        """Queue messages, and send as much as possible without blocking.

        Args:
          data: Encoded messages.
          passed_fd: A descriptor to pass with the messages, or a socket, which is
            closed once its descriptor was passed. On macOS, the caller closes the
            socket once the peer has received it, because an earlier close may end the
            passed connection.
        """
        if not self.unsent and passed_fd is None:
            try:
                sent = self.socket.send(data)
            except OSError as error:
                raise_if_from_handler(error)
                sent = 0  # the socket is full or closed; `flush` handles both
            if sent == len(data):
                return
            data = data[sent:]
        self.unsent.append((data, passed_fd))
        self.flush()

    def flush(self) -> None:
        """Send as many of the unsent messages as possible without blocking."""
        while self.unsent:
            data, passed = self.unsent[0]
            fd = passed.fileno() if isinstance(passed, socket.socket) else passed
            try:
                sent = socket.send_fds(self.socket, [data], [] if fd is None else [fd])
            except OSError as error:
                raise_if_from_handler(error)
                if error.errno not in _BUSY_ERRNOS:
                    # The peer has exited. Messages that it sent earlier can still be
                    # read.
                    self._drop_unsent()
                break
            if isinstance(passed, socket.socket) and sys.platform != "darwin":
                passed.close()
            self.unsent[0] = data[sent:], None
            if sent == len(data):
                self.unsent.popleft()
        if self._selector is not None and not self.is_at_eof:
            events = selectors.EVENT_READ
            if self.unsent:
                events |= selectors.EVENT_WRITE
            self._selector.modify(self.socket, events, self._selector_data)

    def read(self) -> list[ChannelMessage]:
        """Return the received messages, and send unsent messages.

        Raises:
          WorkerError: The received bytes are not a valid message.
        """
        if self.unsent:
            self.flush()
        try:
            data = self.socket.recv(_MAX_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise_if_from_handler(error)
            data = b""
        if data:
            return self._decoder.feed(data)
        if not self.is_at_eof:
            self._unregister()  # the selector would report it as readable forever
            self.is_at_eof = True
        return []

    def wait(self, timeout_seconds: float) -> None:
        """Wait until `read` can return or send messages, or until the timeout."""
        events = select.POLLIN | (select.POLLOUT if self.unsent else 0)
        self._poll.modify(self.socket, events)
        self._poll.poll(math.ceil(1000 * timeout_seconds))

    def close(self) -> None:
        """Close the socket and discard unsent messages."""
        self._drop_unsent()
        if not self.is_at_eof:
            self._unregister()
        self.socket.close()

    def _drop_unsent(self) -> None:
        for _, passed in self.unsent:
            if isinstance(passed, socket.socket):
                passed.close()
        self.unsent.clear()

    def _unregister(self) -> None:
        if self._selector is not None:
            # An interrupt may have prevented the registration.
            with contextlib.suppress(KeyError):
                self._selector.unregister(self.socket)


class MessageReader:
    """The worker's end of the socket pair to the pool; blocking.

    Attributes:
      fds: Received descriptors.
      spin_seconds: Time to poll for a message before blocking. Between polls, the core
        is yielded to other processes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.fds: list[int] = []
        self.spin_seconds = 0.0
        self._socket = sock

    def messages(self) -> Iterator[ChannelMessage]:
        """Yield messages until the pool closes its end."""
        decoder = MessageDecoder()
        has_slab = False
        while True:
            if has_slab:
                data = self._receive()
            else:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
                self.fds += fds
                has_slab = bool(fds)
            if not data:
                return
            yield from decoder.feed(data)

    def _receive(self) -> bytes:
        spin_until = unpatched.perf_counter() + self.spin_seconds
        while unpatched.perf_counter() < spin_until:
            try:
                return self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return self._socket.recv(1 << 16)
