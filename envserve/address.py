"""Addresses of servers: `sim1` is `tcp://sim1:5555`; and who reaches them."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, Self

from envserve.errors import AddressError

__all__ = ["DEFAULT_PORT", "NamedAddress", "complete", "is_private"]

DEFAULT_PORT: Final = 5555
_WORD: Final = re.compile(
    r"((tcp|dns)://)?(?P<host>\[[^]]+\]|[^:/\[\]\s]+)(:(?P<port>\d+))?"
)


class NamedAddress(str):
    """One of the addresses of a name; the key of its server is noted by that."""

    name: str

    def __new__(cls, address: str, name: str) -> Self:
        """Names an address."""
        named = super().__new__(cls, address)
        named.name = name
        return named


def complete(word: str) -> str:
    """Returns a word with scheme and port, `sim1` as `tcp://sim1:5555`.

    Raises:
      AddressError: It is no such word.
    """
    if word.startswith("ipc://") and word != "ipc://":
        return word
    match = _WORD.fullmatch(word)
    port = int(match["port"] or DEFAULT_PORT) if match else -1
    if match is None or port > 65535:
        raise AddressError(
            f"expected an address like sim1, sim1:5555, tcp://127.0.0.1:5555 or "
            f"ipc:///path, or many of them like dns://sims:5555, file:///path or "
            f"ray://namespace/name; got {word!r:.200}"
        )
    return f"tcp://{match['host']}:{port}"


def is_private(address: str) -> bool:
    """Tells whether only this host reaches an address, by tcp:// or ipc://.

    Raises:
      ValueError: It is no such address.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return True
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdigit() and int(port) < 65536):
        raise ValueError(
            f"expected an address like tcp://127.0.0.1:5555 or ipc:///path; "
            f"got {address!r}"
        )
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, an interface or *: whatever that may reach
        return False
