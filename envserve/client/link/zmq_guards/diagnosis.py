"""Why there is no connection, found out beside it: no byte of envserve's is sent.

ZeroMQ's greeting shows whether a server uses keys, and what becomes of a handshake
shows whose key is not known. Neither is looked at as long as connections work.
"""

from __future__ import annotations

import contextlib
import enum
import math
import re
import socket
import threading
import time
from typing import Final

import zmq

from envserve.client.link.zmq_guards.resolver import number_of
from envserve.errors import ConnectError
from envserve.keys.formats import fingerprint
from envserve.keys.key_folder import unknown_server_text
from envserve.keys.key_pair import CurveKeys
from envserve.wire.sockets import UNKNOWN_KEY, use_keys

#: After so long without a connection it is asked why, and then so often.
ALONE_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 1.5
#: Signature and version of ZMTP 3: with it a server sends all of its greeting.
_OUR_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03"
#: The rest of it, of who uses no keys: what uses none says then which socket it is.
_OUR_REST: Final = b"\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)
_SOCKET_TYPE: Final = re.compile(rb"Socket-Type\0\0\0.([A-Z]+)", re.DOTALL)
#: In a row: a server that ends hangs up once, and one in doubt on a quarter of those
#: who ask; one with another key on all, within 0.2 s each.
_MIN_FAILURES: Final = 5


class Finding(enum.Enum):
    """Why there is no connection."""

    NOBODY = enum.auto()  # there, or nobody who says why
    NOT_ZEROMQ = enum.auto()
    USES_NO_KEYS = enum.auto()  # but we do
    NEEDS_KEYS = enum.auto()  # and we have none
    UNKNOWN_CLIENT = enum.auto()
    OTHER_SERVER = enum.auto()  # than the one whose key we have
    FINE = enum.auto()  # there can be one
    UNKNOWN_HOST = enum.auto()
    FOREIGN = enum.auto()  # a ZeroMQ socket, but no server's
    REFUSED = enum.auto()  # nobody listens there, says its host
    SILENT = enum.auto()  # somebody listens who has no time, or waits for us


def diagnose_connection(
    address: str, keys: CurveKeys | None, timeout_seconds: float
) -> Finding:
    """Finds out what becomes of connections to an address.

    Args:
      address: A server's; of those of ipc only whether they are refused is found.
      keys: The server's public key, and an own pair; None if none are used.
      timeout_seconds: Longest to take, but for looking up the host's name.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        mechanism, kind = _greet(address, deadline)
    except (socket.gaierror, UnicodeError):  # that one of an empty or long label
        return Finding.UNKNOWN_HOST
    except ConnectionRefusedError:
        return Finding.REFUSED
    except (OSError, ValueError):
        return Finding.NOBODY
    except EOFError:
        return Finding.SILENT
    if mechanism == b"NULL" and kind not in (b"", b"ROUTER"):
        return Finding.FOREIGN
    if mechanism == b"NULL":
        return Finding.FINE if keys is None else Finding.USES_NO_KEYS
    if mechanism != b"CURVE":
        return Finding.NOT_ZEROMQ
    return Finding.NEEDS_KEYS if keys is None else _shake_hands(address, keys, deadline)


def _greet(address: str, deadline: float) -> tuple[bytes, bytes]:
    """Returns what a greeting says of keys, and which socket that without them is.

    Both are b"" if nothing is said of it.

    Raises:
      OSError: Nobody accepts connections, or nobody who keeps them.
      ValueError: The address is not one of tcp.
      EOFError: Who accepts them says nothing.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX) as stream:
            stream.setblocking(False)
            stream.connect(rest)
    if scheme != "tcp":
        raise ValueError(f"expected an address of tcp; got {address!r}")
    left = max(0.01, deadline - time.monotonic())
    with socket.create_connection((host.strip("[]"), int(port)), left) as stream:
        stream.sendall(_OUR_GREETING)
        if not (greeting := _receive(stream, _GREETING_BYTES, deadline)):
            raise EOFError
        if len(greeting) < _GREETING_BYTES or not greeting[0] & greeting[9] & 1:
            return b"", b""
        mechanism, kind = greeting[_MECHANISM].rstrip(b"\0"), None
        if mechanism == b"NULL":
            stream.sendall(_OUR_REST)
            *_, length = _receive(stream, 2, deadline) or [0]
            kind = _SOCKET_TYPE.search(_receive(stream, length, deadline))
    return mechanism, kind[1] if kind else b""


def _receive(stream: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Returns so many bytes, or those that have come by the deadline or the end.

    Raises:
      OSError: It was closed at once, or reset.
    """
    received = b""
    with contextlib.suppress(TimeoutError):
        while len(received) < num_bytes:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
            part = stream.recv(num_bytes - len(received))
            if not (part or received):
                raise ConnectionError("it was closed at once, maybe by a relay")
            if not part:
                break
            received += part
    return received


def _shake_hands(address: str, keys: CurveKeys, deadline: float) -> Finding:
    """Connects to a server that uses keys, and sends nothing."""
    from zmq.utils.monitor import recv_monitor_message  # which loads asyncio

    address = number_of(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    use_keys(dealer, *keys)
    dealer.setsockopt(zmq.IPV6, "[" in address)
    monitor = dealer.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    failures = 0
    try:
        dealer.connect(address)
        while monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            told = recv_monitor_message(monitor)
            event, value = told["event"], told["value"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return Finding.FINE
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                is_unknown = value == UNKNOWN_KEY
                return Finding.UNKNOWN_CLIENT if is_unknown else Finding.NOBODY
            failures += 1
            # What answers in another key's name breaks the protocol.
            is_broken = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            if is_broken or failures == _MIN_FAILURES:
                return Finding.OTHER_SERVER
        return Finding.NOBODY
    finally:
        dealer.disable_monitor()
        context.destroy(linger=0)


def refusal_of(
    finding: Finding, address: str, keys: CurveKeys | None
) -> ConnectError | None:
    """Returns what to raise because of a finding; None if there is nothing to say."""
    if finding is Finding.NEEDS_KEYS:
        return ConnectError(unknown_server_text(address))
    server = fingerprint(keys[0]) if keys else ""
    client = fingerprint(keys[1].public) if keys else ""
    nothing = "nothing was sent; " if keys else ""
    ask = "is `envserve start` running there, at that port?"
    texts = {
        Finding.UNKNOWN_HOST: "cannot resolve that name; is it spelled right, and does "
        "this network know it?",
        Finding.NOT_ZEROMQ: f"what listens there does not speak ZeroMQ; {nothing}{ask}",
        Finding.SILENT: "what listens there says nothing: it hangs, or does not speak "
        f"ZeroMQ; {nothing}{ask}",
        Finding.FOREIGN: f"a ZeroMQ socket of some other program listens there; {ask}",
        Finding.USES_NO_KEYS: "the server uses no keys, and this client insists on "
        "them; start it without --insecure-no-auth, or say insecure=True in a network "
        "that you trust",
        Finding.UNKNOWN_CLIENT: f"the server does not know this client's key "
        f'({client}): never invited, expired, or removed; run "envserve invite NAME" '
        f'there and "envserve join" here',
        Finding.OTHER_SERVER: f"what answers there has not the key that it had when "
        f"you joined (expected {server}): another server, a new key, or somebody in "
        f"between; nothing was sent; if it was set up anew, join again",
    }
    text = texts.get(finding)
    return None if text is None else ConnectError(f"{address}: {text}")


class Diagnosis:
    """Looks again and again, for somebody who must not wait.

    Attributes:
      is_final: Whether what was found does not mend while one waits: others can be
        invited meanwhile, a host may be about to start, or have no time for a while.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, timeout_seconds: float = math.inf
    ) -> None:
        """Begins after `ALONE_SECONDS`, or a quarter of the timeout if that is less."""
        self.is_final = False
        self._about = address, keys
        self._look_seconds = min(_LOOK_SECONDS, timeout_seconds / 2)
        self._next_at = time.monotonic() + min(ALONE_SECONDS, timeout_seconds / 4)
        self._thread: threading.Thread | None = None
        self._refusal: ConnectError | None = None

    def poll(self, now: float) -> ConnectError | None:
        """Returns why there is no connection, as far as that is found.

        To be called as long as there is none.
        """
        is_looking = self._thread is not None and self._thread.is_alive()
        if now >= self._next_at and not is_looking:
            self._next_at = now + ALONE_SECONDS
            name = f"diagnosis of {self._about[0]}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        return self._refusal

    def _run(self) -> None:
        finding = diagnose_connection(*self._about, self._look_seconds)
        self._refusal = refusal_of(finding, *self._about)
        may_pass = (Finding.UNKNOWN_CLIENT, Finding.UNKNOWN_HOST, Finding.SILENT)
        self.is_final = finding not in may_pass
