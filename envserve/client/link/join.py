"""Join a server: use an invitation to register this client's public key there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from envserve.client.link.connection import Connection
from envserve.client.link.sessionless_requests import request
from envserve.client.link.zmq_guards.diagnosis import (
    Finding,
    connection_error,
    diagnose_connection,
)
from envserve.errors import ConnectError
from envserve.keys import formats
from envserve.keys.invitation import Invitation
from envserve.keys.key_pair import CurveKeys, KeyPair
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Join
from envserve.wire.message import Message

#: Maximum duration of an attempt to connect, and pause between two attempts.
_ATTEMPT_SECONDS: Final = 1.5
_PAUSE_SECONDS: Final = 0.2
#: Minimum time to wait for the reply to JOIN, even after the deadline.
_MIN_JOIN_SECONDS: Final = 1.0
#: Findings that a retry within the timeout does not change.
_PERMANENT: Final = (
    *(Finding.REFUSED, Finding.NOT_ZEROMQ, Finding.NOT_A_SERVER),
    *(Finding.USES_NO_KEYS, Finding.OTHER_SERVER, Finding.UNKNOWN_HOST),
)


def join(
    invitation: Invitation, pair: KeyPair, timeout_seconds: float
) -> Sequence[str]:
    """Join the server of an invitation.

    The invitation can be used only once. Afterwards the server accepts the public key
    of `pair`; its secret key is not sent.

    Args:
      invitation: Addresses, the server's public key, and a temporary secret key.
      pair: Key pair of this client.
      timeout_seconds: Maximum time to find the server at one of its addresses.

    Returns:
      The addresses at which a server with the expected key has replied.

    Raises:
      ConnectError: The server did not reply, or the invitation is no longer valid.
      RemoteProtocolError: The peer is not an envserve server.
      EnvserveError: The server rejected the request.
    """
    deadline = time.monotonic() + timeout_seconds
    keys = invitation.server_public, KeyPair.from_secret(invitation.secret)
    findings = _connect_to_all(invitation.addresses, keys, deadline)
    responsive = [
        address for address, finding in findings.items() if finding is Finding.OK
    ]
    if not responsive:
        if Finding.UNKNOWN_CLIENT in findings.values():
            raise ConnectError(
                "this invitation was already used, or is older than 15 minutes; ask "
                f"for a new one: envserve invite {invitation.name}"
            )
        raise ConnectError(_failure_text(findings, keys))
    message = Message(type=MessageType.JOIN, body=Join(public=pair.public).encode())
    remaining = max(_MIN_JOIN_SECONDS, deadline - time.monotonic())
    with contextlib.closing(Connection(responsive[0], keys)) as connection:
        request(connection, message, MessageType.JOINED, remaining)
    return responsive


def _connect_to_all(
    addresses: Sequence[str], keys: CurveKeys, deadline: float
) -> dict[str, Finding]:
    """Connect to all addresses concurrently; return the last finding for each.

    Retry until one server has replied, the deadline has passed, or retries cannot help
    at any address.
    """
    is_over = threading.Event()
    hopeless: set[str] = set()

    def connect(address: str) -> Finding:
        previous = Finding.UNKNOWN
        while True:
            remaining = max(0.1, deadline - time.monotonic())
            finding = diagnose_connection(
                address, keys, min(remaining, _ATTEMPT_SECONDS)
            )
            if finding in (Finding.OK, Finding.UNKNOWN_CLIENT):
                is_over.set()
            # Except for NOT_ZEROMQ, require the same finding twice, because a server
            # that closes all its connections refuses new ones for 0.1 s.
            if finding in _PERMANENT and finding in (previous, Finding.NOT_ZEROMQ):
                hopeless.add(address)
            previous = finding
            if len(hopeless) == len(addresses):
                is_over.set()
            if is_over.wait(_PAUSE_SECONDS) or time.monotonic() >= deadline:
                return finding

    with ThreadPoolExecutor(len(addresses)) as threads:
        try:
            return dict(zip(addresses, threads.map(connect, addresses), strict=True))
        finally:
            is_over.set()  # ends threads that are still running after Ctrl-C


def _failure_text(findings: Mapping[str, Finding], keys: CurveKeys) -> str:
    """Return, for each address, why no server with the invitation's key replied."""
    texts, key = [], formats.fingerprint(keys[0])
    for address, finding in findings.items():
        error = connection_error(finding, address, keys)
        if error is None or finding is Finding.OTHER_SERVER:
            error = ConnectError(
                f"{address}: no server with the key of this invitation ({key}) "
                f"replied; check the address and the network, and that the server "
                f"runs there; if it has a new key, ask for a new invitation"
            )
        texts.append(str(error))
    return "; ".join(texts)
