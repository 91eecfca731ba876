"""Find out why a client cannot connect, over separate connections.

libzmq retries a failed connection forever and does not report the reason. A diagnosis
therefore opens connections that send no application data. The peer's ZMTP greeting
shows whether it is a ZeroMQ socket and whether it uses keys, and the CURVE handshake
shows which side's key was rejected. No diagnosis runs while there is a connection.
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

from envserve.address import is_local_address
from envserve.client.link.zmq_guards.resolver import resolve_host
from envserve.errors import ConnectError, KeyFileError
from envserve.keys.formats import fingerprint
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import CurveKeys
from envserve.keys.private_files import display_path
from envserve.wire.sockets import UNKNOWN_KEY, use_keys

#: Time without a connection before the first diagnosis, and time between diagnoses.
DELAY_SECONDS: Final = 1.0
#: Maximum duration of a diagnosis.
_MAX_DIAGNOSIS_SECONDS: Final = 1.5
#: Time after which a refused connection is tried again. A server that closes all its
#: connections refuses new ones for 0.1 s.
_CONFIRM_SECONDS: Final = 0.5
#: The first part of a ZMTP 3 greeting (signature and major version), after which the
#: peer sends its whole greeting. If the peer sends nothing, this client also sends line
#: breaks, because a web server replies only to complete lines.
_OUR_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03"
#: The rest of the greeting, for the NULL mechanism (without keys). A peer with the same
#: mechanism then sends its socket type.
_OUR_GREETING_END: Final = b"\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)
_SOCKET_TYPE: Final = re.compile(rb"Socket-Type\0\0\0.([A-Z]+)", re.DOTALL)
#: Number of consecutive failed handshakes that shows that the server has another key. A
#: server that is closing fails one handshake, and an overloaded server fails a quarter
#: of them. A server with another key fails every handshake, each within 0.2 s.
_MIN_FAILURES: Final = 5
#: Maximum number of servers, joined by this client, whose addresses an error lists.
_MAX_SHOWN: Final = 8


class Finding(enum.Enum):
    """Result of a diagnosis: the reason why there is no connection, or OK."""

    UNKNOWN = enum.auto()
    """The reason could not be determined; the host may be down."""
    NOT_ZEROMQ = enum.auto()
    """The peer does not speak ZeroMQ."""
    USES_NO_KEYS = enum.auto()
    """The server uses no keys, but this client does."""
    NEEDS_KEYS = enum.auto()
    """The server uses keys, but this client does not."""
    UNKNOWN_CLIENT = enum.auto()
    """The server rejected the client's key."""
    OTHER_SERVER = enum.auto()
    """The server does not have the key that the client expects."""
    OK = enum.auto()
    """A connection is possible."""
    UNKNOWN_HOST = enum.auto()
    """The name of the host cannot be resolved."""
    NOT_A_SERVER = enum.auto()
    """The peer is a ZeroMQ socket, but does not belong to an envserve server."""
    REFUSED = enum.auto()
    """The host refuses connections, because nothing is listening on the port."""
    SILENT = enum.auto()
    """The peer accepts connections, but sends nothing."""


#: If the addresses of a host have different findings, the one with the lowest number is
#: reported. Findings not listed here have number 1, because they explain a failure.
_PRIORITIES: Final = {Finding.OK: 0, Finding.UNKNOWN: 2, Finding.REFUSED: 3}


def diagnose_connection(
    address: str, keys: CurveKeys | None, timeout_seconds: float
) -> Finding:
    """Find out why connections to an address fail, or whether they succeed.

    Args:
      address: Address of a server; all IP addresses of its host are tried. For ipc,
        only REFUSED can be detected; a missing socket file also counts as REFUSED.
      keys: The server's public key and the client's key pair; None without keys.
      timeout_seconds: Maximum duration, excluding the lookup of the host's name.
    """
    try:
        addresses = resolve_host(address)
    except (OSError, UnicodeError):  # UnicodeError: an empty or long label
        return Finding.UNKNOWN_HOST
    findings: list[Finding] = []
    deadline = time.monotonic() + timeout_seconds
    while addresses and Finding.OK not in findings:
        remaining = max(0.0, deadline - time.monotonic())
        ip_deadline = time.monotonic() + remaining / len(addresses)
        findings.append(_diagnose_ip(addresses.pop(0), keys, ip_deadline))
    return min(findings, key=lambda finding: _PRIORITIES.get(finding, 1))


def _diagnose_ip(address: str, keys: CurveKeys | None, deadline: float) -> Finding:
    """Diagnose connections to an address that contains no host name."""
    try:
        mechanism, socket_type = _read_greeting(address, deadline)
    except (ConnectionRefusedError, FileNotFoundError):
        return Finding.REFUSED
    except (OSError, ValueError):
        return Finding.UNKNOWN
    except EOFError:
        return Finding.SILENT
    if mechanism == b"NULL" and socket_type not in (b"", b"ROUTER"):
        return Finding.NOT_A_SERVER
    if mechanism == b"NULL":
        return Finding.OK if keys is None else Finding.USES_NO_KEYS
    if mechanism != b"CURVE":
        return Finding.NOT_ZEROMQ
    if keys is None:
        return Finding.NEEDS_KEYS
    try:
        return _shake_hands(address, keys, deadline)
    except zmq.ZMQError:  # this process has no free descriptors
        return Finding.UNKNOWN


def _read_greeting(address: str, deadline: float) -> tuple[bytes, bytes]:
    """Read the greeting of a peer.

    Returns:
      The security mechanism, b"" if the peer does not speak ZeroMQ; and the socket type
      if the mechanism is NULL and the peer sends it, otherwise b"".

    Raises:
      OSError: The connection was refused or closed at once, or timed out.
      ValueError: The address is not a tcp address.
      EOFError: The peer accepted the connection but sent nothing.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX) as stream:
            stream.setblocking(False)
            stream.connect(re.sub("^@", "\0", rest))  # @: an abstract socket
    if scheme != "tcp":
        raise ValueError(f"expected a tcp address; got {address!r}")
    remaining = max(0.01, deadline - time.monotonic())
    with socket.create_connection((host.strip("[]"), int(port)), remaining) as stream:
        stream.sendall(_OUR_GREETING)
        soon = (time.monotonic() + deadline) / 2
        if not (greeting := _receive(stream, _GREETING_BYTES, soon)):
            stream.sendall(b"\r\n\r\n")
            greeting = _receive(stream, _GREETING_BYTES, deadline)
        if not greeting:
            raise EOFError
        if len(greeting) < _GREETING_BYTES or not greeting[0] & greeting[9] & 1:
            return b"", b""
        mechanism, socket_type = greeting[_MECHANISM].rstrip(b"\0"), None
        if mechanism == b"NULL":
            stream.sendall(_OUR_GREETING_END)
            *_, length = _receive(stream, 2, deadline) or [0]
            socket_type = _SOCKET_TYPE.search(_receive(stream, length, deadline))
    return mechanism, socket_type[1] if socket_type else b""


def _receive(stream: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive `num_bytes`, or fewer if the deadline passes or the stream ends first.

    Raises:
      OSError: The connection was reset, or closed before the first byte.
    """
    received = b""
    with contextlib.suppress(TimeoutError):
        while len(received) < num_bytes:
            stream.settimeout(max(0.01, deadline - time.monotonic()))
            part = stream.recv(num_bytes - len(received))
            if not (part or received):
                raise ConnectionError("closed before the first byte, maybe by a proxy")
            if not part:
                break
            received += part
    return received


def _shake_hands(address: str, keys: CurveKeys, deadline: float) -> Finding:
    """Run the CURVE handshake with a server, and return the finding."""
    # `zmq.utils.monitor` imports asyncio, so import it only when it is needed.
    from zmq.utils.monitor import recv_monitor_message

    with contextlib.ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        use_keys(dealer, *keys)
        dealer.setsockopt(zmq.IPV6, "[" in address)
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        stack.callback(dealer.disable_monitor)
        failures = 0
        dealer.connect(address)
        while monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = recv_monitor_message(monitor)
            event, value = message["event"], message["value"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return Finding.OK
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                is_unknown = value == UNKNOWN_KEY
                return Finding.UNKNOWN_CLIENT if is_unknown else Finding.UNKNOWN
            failures += 1
            # A protocol error shows that the peer lacks the server's secret key.
            is_broken = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            if is_broken or failures == _MIN_FAILURES:
                return Finding.OTHER_SERVER
        return Finding.UNKNOWN


def connection_error(
    finding: Finding, address: str, keys: CurveKeys | None
) -> ConnectError | None:
    """Return the error for a finding; None if a connection may still succeed."""
    if finding is Finding.REFUSED:
        return ConnectError(f"{address}: {_refused_text(address)}")
    client = fingerprint(keys[1].public) if keys else ""
    nothing_sent = "nothing was sent; " if keys else ""
    ask = "is `envserve start` running there, on that port?"
    texts = {
        Finding.UNKNOWN_HOST: "cannot resolve the host name; check its spelling and "
        "the DNS of this network",
        Finding.NOT_ZEROMQ: f"the program that listens there does not speak ZeroMQ; "
        f"{nothing_sent}{ask}",
        Finding.SILENT: "the program that listens there does not reply: it "
        f"hangs, or does not speak ZeroMQ; {nothing_sent}{ask}",
        Finding.NOT_A_SERVER: "a ZeroMQ socket of another program listens there; "
        f"{ask}",
        Finding.NEEDS_KEYS: "the server requires keys, but this client connects "
        "without them; omit --insecure (insecure=True)",
        Finding.USES_NO_KEYS: "the server uses no keys, but this client requires them; "
        "start it without --insecure-no-auth, or pass insecure=True in a network that "
        "you trust",
        Finding.UNKNOWN_CLIENT: f"the server does not know this client's key "
        f"({client}): it was never invited, has expired, or was removed; run "
        f'"envserve invite NAME --at ADDRESS" there and "envserve join" here',
        Finding.OTHER_SERVER: _other_key_text(address, keys),
    }
    text = texts.get(finding)
    return None if text is None else ConnectError(f"{address}: {text}")


def _other_key_text(address: str, keys: CurveKeys | None) -> str:
    """Return the text for a server that does not have the expected key."""
    folder, expected = KeyFolder(), fingerprint(keys[0]) if keys else ""
    server_key = None
    with contextlib.suppress(KeyFileError):  # a key that is not needed may be damaged
        server_key = folder.key("server")
    if keys is not None and server_key and server_key.public == keys[0]:
        return (
            f"expected the key of this user's servers ({expected}), because no other "
            f"key is recorded for this address; the server has another key. If the key "
            f"was replaced (envserve keys new), stop the server with SIGTERM and start "
            f"it again. If you started it with another ENVSERVE_HOME, set it here too "
            f"(the key folder is {display_path(folder.path)}); if another user did, "
            f'run "envserve invite NAME --at {address}" there and "envserve join" '
            f"here; nothing was sent"
        )
    return (
        f"the server does not have the key that it had when you joined (expected "
        f"{expected}): it is another server, has a new key, or is a man in the middle; "
        f"nothing was sent; if it was set up again, join again: envserve join --replace"
    )


def unknown_key_error(address: str, error: ConnectError) -> ConnectError:
    """Complete the error for a server whose key is unknown, after a diagnosis.

    The port may be wrong, or the address may be another name of a joined host.
    Therefore the error also names the program that listens there, and the addresses
    that this client has joined.
    """
    finding = diagnose_connection(address, None, _MAX_DIAGNOSIS_SECONDS)
    if finding is Finding.OK:
        finding = Finding.USES_NO_KEYS
    text = str(error)
    if finding is Finding.UNKNOWN:
        text += "; no program replies at this address now"
    elif finding is not Finding.NEEDS_KEYS:
        text = str(connection_error(finding, address, None))
    if joined := _joined_addresses(address):
        text += f"; this client has joined {', '.join(joined)}"
    return ConnectError(text)


def _joined_addresses(address: str) -> list[str]:
    """Return addresses that this client has joined.

    If some of them belong to the host in `address`, return only these.
    """
    joined = [each for each in KeyFolder().pinned_addresses if "*" not in each]
    joined, ips = joined[:_MAX_SHOWN], _ips_of(address)
    return [each for each in joined if ips & _ips_of(each)] or joined


def _ips_of(address: str) -> set[str]:
    """Return the host name in an address, and the IP addresses it resolves to."""
    found = [address]
    with contextlib.suppress(OSError, UnicodeError):
        found += resolve_host(address)
    return {each.rpartition(":")[0] for each in found}


def _refused_text(address: str) -> str:
    """Return the cause of a refused connection, and the remedy."""
    tried, bind = "", address
    with contextlib.suppress(OSError, UnicodeError):
        if (found := resolve_host(address)) != [address]:
            tried = f" at {', '.join(found)}"
    if not is_local_address(address):
        bind = f"tcp://0.0.0.0:{address.rpartition(':')[2]}"
    return (
        f"connection refused{tried}: no program is listening there; run "
        f"`envserve start --bind {bind}` on that host"
    )


class Diagnosis:
    """Repeated diagnosis in a background thread, so that the caller never blocks.

    Attributes:
      is_final: Whether the last finding is permanent. Some findings are not: an unknown
        client can still be invited, and an unknown host, or a server that does not
        accept connections or does not reply, may just be starting.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, timeout_seconds: float = math.inf
    ) -> None:
        """Schedule the first diagnosis: in 1 s, or sooner if the timeout is short."""
        self.is_final = False
        self._target = address, keys
        self._timeout_seconds = min(_MAX_DIAGNOSIS_SECONDS, timeout_seconds / 2)
        self._next_at = time.monotonic() + min(DELAY_SECONDS, timeout_seconds / 4)
        self._thread: threading.Thread | None = None
        self._error: ConnectError | None = None

    def poll(self, now: float) -> ConnectError | None:
        """Return the error of the last diagnosis, if any; start the next one when due.

        Call this only while there is no connection.
        """
        is_running = self._thread is not None and self._thread.is_alive()
        if now >= self._next_at and not is_running:
            self._next_at = now + DELAY_SECONDS
            name = f"diagnosis of {self._target[0]}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                self._thread.start()
        return self._error

    def _run(self) -> None:
        finding = diagnose_connection(*self._target, self._timeout_seconds)
        if finding is Finding.REFUSED:
            time.sleep(_CONFIRM_SECONDS)
            finding = diagnose_connection(*self._target, self._timeout_seconds)
        self._error = connection_error(finding, *self._target)
        temporary = (Finding.UNKNOWN_CLIENT, Finding.UNKNOWN_HOST, Finding.SILENT)
        self.is_final = finding not in (*temporary, Finding.REFUSED)
