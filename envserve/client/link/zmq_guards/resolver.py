"""Hosts' names as numbers, looked up beside all else.

ZeroMQ would look them up in the thread that serves all sockets, and wait there for as
long as a name server does not answer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading


def is_number(address: str) -> bool:
    """Tells whether an address has no name: but a number, or a path, or is none."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host.strip("[]")))
    return False


def number_of(address: str) -> str:
    """Returns an address with its host's number: that of IPv4, if it has both.

    Raises:
      OSError: Nobody knows the host.
      UnicodeError: It is no name of a host.
    """
    if is_number(address):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    numbers = [str(place[0]) for *_, place in found]
    number = min(numbers, key=lambda number: ":" in number)
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


class Lookup:
    """Looks up an address once, in a thread.

    Attributes:
      address: What is looked up.
      has_ended: Is set when it is over.
      found: The address with a number, by then; empty if nobody knows the host.
    """

    def __init__(self, address: str) -> None:
        """Begins."""
        self.address, self.found = address, ""
        self.has_ended = threading.Event()
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # no thread to be had: as if nobody knew the host
            self.has_ended.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            self.found = number_of(self.address)
        self.has_ended.set()
