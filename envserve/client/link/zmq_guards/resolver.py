"""Resolve host names in separate threads.

libzmq would resolve them in the I/O thread that serves all sockets, and block there
while a name server does not reply.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import threading


def needs_no_lookup(address: str) -> bool:
    """Return whether an address contains an IP address or path, or is malformed."""
    scheme, _, location = address.partition("://")
    host, _, port = location.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host.strip("[]")))
    return False


def resolve_host(address: str) -> list[str]:
    """Replace the host name in an address with each of its IP addresses.

    IPv4 and IPv6 addresses alternate, beginning with IPv4, because servers most likely
    bind an IPv4 address.

    Raises:
      OSError: The host is unknown.
      UnicodeError: The name is not a valid host name.
    """
    if needs_no_lookup(address):
        return [address]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ips = dict.fromkeys(_ip_of(*socket_address) for *_, socket_address in found)
    ipv4 = [f"tcp://{ip}:{port}" for ip in ips if ":" not in ip]
    ipv6 = [f"tcp://[{ip}]:{port}" for ip in ips if ":" in ip]
    pairs = itertools.zip_longest(ipv4, ipv6)
    return [address for address in itertools.chain(*pairs) if address]


def _ip_of(ip: str | int, _port: int | bytes, _flow: int = 0, scope: int = 0) -> str:
    """Return the IP address in a socket address, with the zone of a link-local one."""
    return f"{ip}%{scope}" if scope else str(ip)


class Lookup:
    """Resolves the host of an address once, in a thread.

    Attributes:
      address: Address with the host name.
      has_ended: Event that is set when the lookup has finished.
      found: The address with each IP address of the host, once `has_ended` is set;
        empty if the host is unknown.
      num_tried: Number of connection attempts to these addresses, in turn.
    """

    def __init__(self, address: str) -> None:
        """Start the thread."""
        self.address = address
        self.found = list[str]()
        self.num_tried = 0
        self.has_ended = threading.Event()
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # the system is out of threads; the caller retries later
            self.has_ended.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            self.found = resolve_host(self.address)
        self.has_ended.set()
