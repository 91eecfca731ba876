"""Requests that belong to no session, over a separate connection."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Final

from envserve.client.link.connection import SLICE_SECONDS, Connection, SharedContext
from envserve.client.link.zmq_guards.diagnosis import Diagnosis
from envserve.errors import ConnectError, RemoteProtocolError
from envserve.wire.constants import MessageType
from envserve.wire.error_body import ErrorBody, exception_of
from envserve.wire.handshake import Hello, Welcome, check_versions
from envserve.wire.message import Message, decode, encode

#: Interval at which a request is resent, because it may be lost: the server can close
#: connections at any time.
_RESEND_SECONDS: Final = 0.5


def request_welcome(
    address: str,
    timeout_seconds: float,
    *,
    insecure: bool = False,
    context: SharedContext | None = None,
) -> Welcome:
    """Request the WELCOME message of a server, which lists its envs and versions.

    Args:
      address: Address of the server.
      timeout_seconds: Maximum time to wait.
      insecure: Whether to connect without keys; see `KeyFolder.keys_for`.
      context: ZeroMQ context that several requests share; by default a new one.

    Raises:
      ConnectError: No server replied in time, or the connection failed; see
        `Connection`.
      ProtocolMismatch: The server speaks different protocol versions.
      RemoteProtocolError: The peer is not an envserve server.
    """
    hello = Message(type=MessageType.HELLO, body=Hello(client="health").encode())
    with contextlib.closing(
        Connection(address, insecure=insecure, context=context)
    ) as connection:
        reply = request(connection, hello, MessageType.WELCOME, timeout_seconds)
    with _naming_peer(address):
        welcome = Welcome.decode(reply.body)
    check_versions(welcome, address)
    return welcome


def request(
    connection: Connection,
    message: Message,
    reply_type: MessageType,
    timeout_seconds: float,
) -> Message:
    """Send a request that belongs to no session, and return its reply.

    Replies with a different request number are ignored.

    Raises:
      ConnectError: No server replied in time.
      RemoteProtocolError: The peer is not an envserve server.
      EnvserveError: The server replied with an error, which is raised here.
    """
    address = connection.address
    deadline = time.monotonic() + timeout_seconds
    diagnosis = Diagnosis(address, connection.keys, timeout_seconds)
    sent_at = -math.inf
    while (now := time.monotonic()) < deadline:
        if now - sent_at >= _RESEND_SECONDS and connection.send(encode(message)):
            sent_at = now
        failure = diagnosis.poll(now)
        # Receive before raising `failure`: a server may have replied and then exited.
        if (frames := connection.receive()) is None:
            if failure is not None:
                raise failure
            if connection.exceeds_limit(connection.poll()[1]):
                connection.renew(connection.max_frame_bytes)  # discards the message
                text = "a message exceeds the protocol's size limit"
                raise RemoteProtocolError(f"{address}: {text}")
            until = min(deadline, now + SLICE_SECONDS)
            connection.wait(until - now, for_writing=sent_at == -math.inf)
            continue
        with _naming_peer(address):
            reply = decode(frames)
            if reply.request != message.request:
                continue
            if reply.type is MessageType.ERROR:
                raise exception_of(ErrorBody.decode(reply.body), address)
        if reply.type is reply_type:
            return reply
    hint = "; another program may be listening there" if sent_at > -math.inf else ""
    raise ConnectError(
        f"{address}: no server replied within {timeout_seconds:g} s"
        f"{connection.tried_text}{hint}"
    )


@contextlib.contextmanager
def _naming_peer(address: str) -> Iterator[None]:
    """Name the peer in a RemoteProtocolError."""
    try:
        yield
    except RemoteProtocolError as error:
        raise RemoteProtocolError(
            f"{address}: {error}; check that an envserve server is listening there"
        ) from None
