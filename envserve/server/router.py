"""Receives and sends the messages of a server, over all of its sockets.

A peer is (socket, route, user). On tcp the user is the owner of the key that a message
was sent with, which ZeroMQ reports for each message; on ipc it is this user, "local".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq

from envserve.server.zmq_guards.send_budget import LONG_BYTES, SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.wire.message import Buffer, Peer
from envserve.wire.sockets import NOBLOCK, Frames

_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
#: Frames of one message that are discarded before all connections are closed. While
#: libzmq receives such a message, no other client is heard.
_MAX_DISCARDED: Final = 50_000


class Router:
    """All sockets of a server, as if they were one.

    Attributes:
      sockets: The sockets.
    """

    def __init__(self, sockets: ServerSockets, budget: SendBudget) -> None:
        self.sockets = sockets
        self._budget = budget

    def receive(self) -> tuple[Peer, Frames] | None:
        """Return the sender and the frames of the next message, if there is one."""
        in_turn = self.sockets.in_turn
        for _ in range(len(in_turn)):
            socket = in_turn[0]
            in_turn.rotate()
            while (frames := socket.receive()) is not None:
                user = socket.sender
                if socket.has_keys and not user:
                    continue
                return (socket.number, bytes(frames[0]), user), frames[1:]
            if socket.receiver.num_discarded > _MAX_DISCARDED:
                self.sockets.recycle("a message had too many frames", socket.sender)
                break
        return None

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> bool:
        """Pass a message to ZeroMQ; return False if the peer is gone or too slow."""
        number, route, _ = peer
        socket = self.sockets.by_number.get(number)
        if socket is None:
            return False
        if max(map(len, frames)) >= LONG_BYTES:
            admitted = self._budget.admit(peer, frames)
            if admitted is None:
                return False
            frames = admitted
        send = socket.send
        try:
            send(route, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE, len(frame) < LONG_BYTES)
            send(frames[-1], NOBLOCK, len(frames[-1]) < LONG_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True
