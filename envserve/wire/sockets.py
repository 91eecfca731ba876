"""What both ends do with ZeroMQ sockets: folders, options, and bounded receiving."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
from typing import Final

import zmq

from envserve.keys.key_pair import KeyPair

__all__ = [
    "KEYED_BYTES",
    "NOBLOCK",
    "UNKNOWN_KEY",
    "FrameReceiver",
    "Frames",
    "descriptor_of",
    "raise_file_limit",
    "set_common_options",
    "socket_folder",
    "use_keys",
]

_LOGGER: Final = logging.getLogger(__name__)

#: Of a path to temporary files: one to a socket has at most 103 bytes on macOS.
_MAX_FOLDER: Final = 70
#: Plain numbers: ZeroMQ's own flags are slow to combine.
NOBLOCK: Final = int(zmq.NOBLOCK)
_POLLIN: Final = int(zmq.POLLIN)

#: By how much a frame is longer where keys are used, at most.
KEYED_BYTES: Final = 64

#: What ZAP says of a key that is surely unknown; of others it is asked again.
UNKNOWN_KEY: Final = 400

Frames = list[bytes | memoryview]

#: Frames of an oversized message that are thrown away at once.
_DISCARD_AT_ONCE: Final = 1000


def set_common_options(socket: zmq.Socket[bytes]) -> None:
    """Sets what makes both ends notice a dead connection within about 3 seconds.

    Keepalive alone notices nothing while data is under way; TCP_MAXRT does. ZMTP
    heartbeats are not used: on a connecting socket whose receive pipe is full,
    libzmq 4.3.5 aborts the process.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 3000)  # ms; without effect where unsupported


def use_keys(socket: zmq.Socket[bytes], server: bytes, own: KeyPair) -> None:
    """Has a connecting socket use a pair of its own, and believe one server only."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for ipc addresses, of mode 0700; in /tmp if TMPDIR is long."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER
    return tempfile.TemporaryDirectory("", "envserve-", "/tmp" if is_long else None)


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Returns a descriptor that shows an edge when EVENTS may have changed."""
    return int(socket.getsockopt(zmq.FD))


class FrameReceiver:
    """Receives messages of at most so many frames.

    ZeroMQ bounds the size of a frame, but not how many a message has. A message comes
    here when its last frame has come: until then libzmq stores what there is of it.

    Attributes:
      is_discarding: Whether a message of too many frames is being thrown away.
      first: The frame that began the latest message: ZeroMQ's words about its sender
        are with it.
      num_discarded: How many frames of the last such message were.
      num_messages: How many messages have come.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], max_frames: int, num_short: int
    ) -> None:
        """Reads from the socket, which nothing else may do from now on.

        Args:
          socket: What to read from.
          max_frames: Most frames of a message that are kept.
          num_short: How many frames come first that are short; the memory of later
            ones is ZeroMQ's own.
        """
        self._socket = socket
        self._max_frames = max_frames
        self._num_short = num_short
        self._readable = [(socket, _POLLIN)]
        self.is_discarding = False
        self.first = zmq.Frame()
        self.num_discarded = self.num_messages = 0

    def receive(self, *, waits: bool = False) -> Frames | None:
        """Returns the next message; None when there is none yet.

        A message of too many frames comes back cut off after the allowed number. Its
        rest is thrown away bit by bit, in this call and the next ones.

        Args:
          waits: Whether to wait for it, at most for the socket's RCVTIMEO.
        """
        socket = self._socket
        if self.is_discarding and not self._discard():
            return None
        # Quicker than to be told by an exception, or to ask for EVENTS.
        if not waits and not zmq.zmq_poll(self._readable, 0):
            return None
        try:
            frame = socket.recv(0 if waits else NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.first = frame
        self.num_messages += 1
        frames: Frames = [frame.bytes]
        while frame.more:  # a frame knows; to ask the socket takes longer
            if len(frames) == self._max_frames:
                self.is_discarding = True
                self.num_discarded = 0
                self._discard()
                break
            frame = socket.recv(NOBLOCK, copy=False)
            is_short = len(frames) < self._num_short
            frames.append(frame.bytes if is_short else frame.buffer)
        return frames

    def _discard(self) -> bool:
        for _ in range(_DISCARD_AT_ONCE):
            if not self._socket.getsockopt(zmq.RCVMORE):
                self.is_discarding = False
                return True
            self._socket.recv(NOBLOCK)
            self.num_discarded += 1
        return False


def raise_file_limit() -> int:
    """Allows as many open files as may be: workers, clients and servers need some.

    ZeroMQ ends a process that runs out of them.

    Returns:
      How many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: "unlimited" is more than it gives
        _LOGGER.info("the limit of %d open files stays: %s", soft, error)
        return soft
    return hard
