"""What both ends do with their ZeroMQ socket: options, and bounded receiving."""

from __future__ import annotations

from typing import Final

import zmq

__all__ = [
    "FrameReceiver",
    "can_receive",
    "can_send",
    "descriptor_of",
    "set_common_options",
]

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


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Returns a descriptor that shows an edge when `can_receive` may have changed."""
    return int(socket.getsockopt(zmq.FD))


def can_receive(socket: zmq.Socket[bytes]) -> bool:
    """Tells whether a frame is there to be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def can_send(socket: zmq.Socket[bytes]) -> bool:
    """Tells whether a message can be handed over."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)


class FrameReceiver:
    """Receives messages of at most so many frames, without waiting.

    ZeroMQ bounds the size of a frame, but not how many a message has. A message comes
    here when its last frame has come: until then libzmq stores what there is of it.
    """

    def __init__(self, socket: zmq.Socket[bytes], max_frames: int) -> None:
        """Reads from the socket, which nothing else may do from now on."""
        self._socket = socket
        self._max_frames = max_frames
        self._is_discarding = False

    def receive(self) -> list[bytes] | None:
        """Returns the next message; None when there is none yet.

        A message of too many frames comes back cut off after the allowed number. Its
        rest is thrown away bit by bit, in this call and the next ones.
        """
        if self._is_discarding and not self._discard():
            return None
        socket = self._socket
        try:
            frames = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) == self._max_frames:
                self._is_discarding = True
                self._discard()
                break
            frames.append(socket.recv(zmq.NOBLOCK))
        return frames

    def _discard(self) -> bool:
        for _ in range(_DISCARD_AT_ONCE):
            if not self._socket.getsockopt(zmq.RCVMORE):
                self._is_discarding = False
                return True
            self._socket.recv(zmq.NOBLOCK)
        return False
