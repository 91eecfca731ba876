"""ZeroMQ helpers for clients and servers: folders, socket options, bounded receives."""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
from typing import Final

import zmq

from envserve.errors import ServerError
from envserve.keys.key_pair import KeyPair

_LOGGER: Final = logging.getLogger(__name__)

#: Maximum length of the temporary folder's path, because on macOS, the path of a socket
#: in the folder may have at most 103 bytes.
_MAX_FOLDER_BYTES: Final = 70
#: Limit on open files that every macOS accepts if the hard limit is "unlimited".
_OPEN_MAX: Final = 10240
#: Plain ints, because combining pyzmq's enum members with `|` is slow.
NOBLOCK: Final = int(zmq.NOBLOCK)
_POLLIN: Final = int(zmq.POLLIN)

#: Maximum number of bytes that CURVE adds to a frame.
CURVE_OVERHEAD_BYTES: Final = 64

#: ZAP status code for an unknown key. ZeroMQ stops connecting after this code, and
#: retries after all other codes.
UNKNOWN_KEY: Final = 400

Frames = list[bytes | memoryview]

#: Maximum number of frames that a call to `receive` discards, so that it returns soon.
_DISCARD_BATCH: Final = 1000


def set_common_options(socket: zmq.Socket[bytes]) -> None:
    """Set options so that a dead connection is detected within about 3 seconds.

    TCP keepalive alone is not sufficient, because it is inactive while sent data is
    unacknowledged; TCP_MAXRT covers this case. ZMTP heartbeats are not used, because
    libzmq 4.3.5 aborts the process if a connecting socket's receive pipe is full.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 3000)  # milliseconds; not all systems support it


def use_keys(
    socket: zmq.Socket[bytes], server_public: bytes, key_pair: KeyPair
) -> None:
    """Set the CURVE keys of a connecting socket; it then accepts no other server."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key_pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_pair.secret)


def exclude_other_users(socket: zmq.Socket[bytes]) -> None:
    """Let an `ipc://` socket reject other users' processes; call this before `bind`.

    macOS's libzmq lacks this option. There, only the modes of the socket's file or
    folder exclude other users, as they do on Linux too.
    """
    if sys.platform == "linux":
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder of mode 0700 for ipc sockets; in /tmp if TMPDIR is too long.

    Raises:
      ServerError: No folder can be created.
    """
    try:
        is_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES
        return tempfile.TemporaryDirectory("", "envserve-", "/tmp" if is_long else None)
    except OSError as error:
        raise ServerError(
            f"cannot create a temporary folder: {error.strerror}; make room or set "
            f"TMPDIR"
        ) from None


def event_fd(socket: zmq.Socket[bytes]) -> int:
    """Return a descriptor that becomes readable (edge-triggered) if EVENTS changes."""
    return int(socket.getsockopt(zmq.FD))


class FrameReceiver:
    """Receives messages with a bounded number of frames.

    ZeroMQ limits the size of a frame, but not the number of frames in a message. It
    delivers a message when the last frame has arrived; until then libzmq stores all
    frames.

    Attributes:
      is_discarding: Whether the remaining frames of a message that has too many are
        being discarded.
      first_frame: First frame of the latest message; it carries ZeroMQ's metadata about
        the sender.
      num_discarded: Number of discarded frames of the last message that had too many.
      num_messages: Number of received messages.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], max_frames: int, num_small_frames: int
    ) -> None:
        """Start receiving; nothing else may read from the socket afterwards.

        Args:
          socket: Socket to read from.
          max_frames: Maximum number of frames of a message to return.
          num_small_frames: Number of leading frames that are copied, because they are
            short. Later frames are returned as views of ZeroMQ's memory.
        """
        self._socket = socket
        self._max_frames = max_frames
        self._num_small_frames = num_small_frames
        self._readable = [(socket, _POLLIN)]
        self.is_discarding = False
        self.first_frame = zmq.Frame()
        self.num_discarded = self.num_messages = 0

    def receive(self, timeout_ms: int = 0) -> Frames | None:
        """Return the next message, or None if there is none before the timeout.

        A message with too many frames is returned with the allowed number of frames.
        Its other frames are discarded in batches, in this call and later calls.

        Args:
          timeout_ms: Maximum time to wait for a message, in milliseconds. If signals
            arrive more often, such as those of a profiler, the wait may take a second.
        """
        socket = self._socket
        if self.is_discarding and not self._discard():
            return None
        # Polling is faster than catching zmq.Again or reading EVENTS. A blocking `recv`
        # would start its timeout again after each signal, and might never return.
        if not zmq.zmq_poll(self._readable, timeout_ms):
            return None
        try:
            frame = socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.first_frame = frame
        self.num_messages += 1
        frames: Frames = [frame.bytes]
        while frame.more:  # faster than getsockopt(RCVMORE)
            if len(frames) == self._max_frames:
                self.is_discarding = True
                self.num_discarded = 0
                self._discard()
                break
            frame = socket.recv(NOBLOCK, copy=False)
            is_short = len(frames) < self._num_small_frames
            frames.append(frame.bytes if is_short else frame.buffer)
        return frames

    def _discard(self) -> bool:
        for _ in range(_DISCARD_BATCH):
            if not self._socket.getsockopt(zmq.RCVMORE):
                self.is_discarding = False
                return True
            self._socket.recv(NOBLOCK)
            self.num_discarded += 1
        return False


def raise_file_limit() -> int:
    """Raise this process's limit on open files to the hard limit.

    Workers, clients and servers each need descriptors, and ZeroMQ aborts the process if
    none are left.

    Returns:
      The limit that is now in effect.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for soft in (hard, max(limit, _OPEN_MAX)) if limit != hard else ():
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError) as error:  # macOS rejects its own "unlimited"
            _LOGGER.info("cannot raise the limit of %d open files: %s", limit, error)
        else:
            limit = soft
            break
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
