"""Join a server: use an invitation to register this client's public key there."""

from __future__ import annotations

import math
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from envserve.client.link.zmq_guards.resolver import resolve_host
from envserve.errors import ConnectError
from envserve.keys import formats
from envserve.keys.invitation import Invitation
from envserve.keys.key_pair import KeyPair
from envserve.wire.constants import MAX_BODY_BYTES, MessageType
from envserve.wire.handshake import ErrorBody, Join, exception_of
from envserve.wire.message import Message, decode, encode
from envserve.wire.sockets import UNKNOWN_KEY, set_common_options, use_keys


def join(invitation: Invitation, pair: KeyPair, timeout_seconds: float) -> None:
    """Join the server of an invitation at the first address that answers.

    The invitation can be used only once. Afterwards the server accepts the public key
    of `pair`; its secret key is not sent.

    Args:
      invitation: Addresses, the server's public key, and a temporary secret key.
      pair: Key pair of this client.
      timeout_seconds: Maximum time for all addresses together.

    Raises:
      ConnectError: The server did not answer, or the invitation is no longer valid.
      RemoteProtocolError: The peer is not an envserve server.
      ServerError: The server rejected the request.
    """
    seconds = timeout_seconds / len(invitation.addresses)
    for known_as in invitation.addresses:
        try:
            address = resolve_host(known_as)
        except (OSError, UnicodeError):  # the host is unknown
            continue
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            set_common_options(socket)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
            socket.setsockopt(zmq.IPV6, "[" in address)
            use_keys(
                socket, invitation.server_public, KeyPair.from_secret(invitation.secret)
            )
            if _request_join(socket, invitation, address, pair.public, seconds):
                return
        finally:
            context.destroy(linger=0)
    raise ConnectError(
        f"{', '.join(invitation.addresses)}: no server with the key of this invitation "
        f"({formats.fingerprint(invitation.server_public)}) answered within "
        f"{timeout_seconds:g} s; check that the server is running and reachable"
    )


def _request_join(
    socket: zmq.Socket[bytes],
    invitation: Invitation,
    address: str,
    public: bytes,
    seconds: float,
) -> bool:
    """Send JOIN to an address; return whether the server confirmed it in time."""
    asked = Message(type=MessageType.JOIN, body=Join(public=public).encode())
    deadline = time.monotonic() + seconds
    poller = zmq.Poller()
    with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        socket.connect(address)
        socket.send_multipart(encode(asked))
        while (left := deadline - time.monotonic()) > 0:
            ready: dict[Any, int] = dict(poller.poll(math.ceil(1000 * left)))
            if monitor in ready:
                if recv_monitor_message(monitor)["value"] == UNKNOWN_KEY:
                    raise ConnectError(invitation.rejected_text)
            elif socket in ready:
                answer = decode(socket.recv_multipart())
                if answer.type is MessageType.ERROR:
                    raise exception_of(ErrorBody.decode(answer.body), address)
                if answer.type is MessageType.JOINED:
                    return True
    return False
