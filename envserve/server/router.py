"""Receives and sends messages over all sockets of a server.

A peer is a tuple (socket number, route, user). On tcp, ZeroMQ reports for each message
the user whose key the connection uses; without keys, the user is "". On ipc the user
is "local", because only processes of the server's user can connect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq

from envserve.server.zmq_guards.send_budget import LARGE_FRAME_BYTES, SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.wire.message import Buffer, Peer
from envserve.wire.sockets import NOBLOCK, Frames

_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
#: Maximum number of discarded frames of one message. After that, all connections are
#: closed, because discarding delays the messages of other clients, and libzmq cannot
#: close a single connection.
_MAX_DISCARDED: Final = 50_000


class Router:
    """Reads from a server's sockets in turn; sends messages over the peer's socket.

    Attributes:
      sockets: The sockets.
      discarding_user: When `receive` has returned None: the user whose message is being
        discarded because it has too many frames, or None.
      is_full: When `send` has returned False: whether the peer's queue is full.
    """

    def __init__(self, sockets: ServerSockets, budget: SendBudget) -> None:
        self.sockets = sockets
        self.discarding_user: str | None = None
        self.is_full = False
        self._budget = budget

    def receive(self) -> tuple[Peer, Frames] | None:
        """Return the sender and frames of the next message; None if there is none."""
        rotation, self.discarding_user = self.sockets.rotation, None
        for _ in range(len(rotation)):
            socket = rotation[0]
            rotation.rotate()
            while (frames := socket.receive()) is not None:
                user = socket.sender
                if socket.has_keys and not user:
                    continue
                return (socket.number, bytes(frames[0]), user), frames[1:]
            if socket.receiver.is_discarding:
                self.discarding_user = socket.sender
                if socket.receiver.num_discarded > _MAX_DISCARDED:
                    self.sockets.reopen("a message had too many frames", socket.sender)
                    self.discarding_user = None
                    break
        return None

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> bool:
        """Pass a message to ZeroMQ; return False if the peer is gone or too slow."""
        self.is_full = False
        number, route, _ = peer
        socket = self.sockets.by_number.get(number)
        if socket is None:
            return False
        if max(map(len, frames)) >= LARGE_FRAME_BYTES:
            admitted = self._budget.admit(peer, frames)
            if admitted is None:
                return False
            frames = admitted
        send = socket.send
        try:
            send(route, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE, len(frame) < LARGE_FRAME_BYTES)
            send(frames[-1], NOBLOCK, len(frames[-1]) < LARGE_FRAME_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.is_full = error.errno == zmq.EAGAIN
            return False
        return True
