"""Server addresses: complete short forms, and recognise local addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Collection
from typing import Final, Self

from envserve.errors import AddressError

DEFAULT_PORT: Final = 5555
_ADDRESS: Final = re.compile(
    r"((tcp|dns)://)?(?P<host>\[[^]%][^]]*\]|[^:/\[\]\s]+)(:(?P<port>[0-9]{1,5}))?"
)
_PORT: Final = re.compile("[0-9]{1,5}")
#: A character that no address can contain: NUL, or part of a word of the command line
#: that is not UTF-8.
_INVALID: Final = re.compile("[\0\ud800-\udfff]")


class NamedAddress(str):
    """An address that was resolved from a name, such as `dns://sims:5555`.

    The server's key is pinned under the name instead of the address, because the
    addresses of a name can change.
    """

    name: str
    """The name, such as `tcp://sims:5555` or `ray://namespace/name`."""

    def __new__(cls, address: str, name: str) -> Self:
        """Create the address and attach its name."""
        result = super().__new__(cls, address)
        result.name = name
        return result


def complete_address(address: str, *, min_port: int = 1) -> str:
    """Return an address with scheme and port: `tcp://sim1:5555` for `sim1`.

    A `NamedAddress` is returned unchanged, because it is complete.

    Raises:
      AddressError: The address is malformed, or its port is not a number from
        `min_port` to 65535.
    """
    if isinstance(address, NamedAddress):
        return address
    is_text = not _INVALID.search(address)
    if address.startswith("ipc://") and address != "ipc://" and is_text:
        return address
    match = _ADDRESS.fullmatch(address) if is_text else None
    port = int(match["port"] or DEFAULT_PORT) if match else -1
    if match is None or not min_port <= port <= 65535:
        hint = "; use the port that the server has printed" if port == 0 else ""
        hint = hint or _remedy(address)
        raise AddressError(
            f"expected an address like sim1, sim1:5555, tcp://127.0.0.1:5555 or "
            f"ipc:///path, or a source of addresses like dns://sims:5555, file:///path "
            f"or ray://namespace/name; got {address!r:.200}{hint}"
        )
    return f"tcp://{match['host']}:{port}"


def complete_bind(address: str) -> str:
    """Return an address to listen on with scheme and port, like `complete_address`.

    Raises:
      ValueError: The address is malformed.
    """
    # dns:// names several hosts. A number is more likely a port than a host.
    if not (address.startswith("dns://") or address.isdigit()):
        with contextlib.suppress(AddressError):  # raised below, with the valid forms
            address = complete_address(address, min_port=0)  # 0: any free port
    is_local_address(address)
    return address


def is_local_address(address: str) -> bool:
    """Return whether an address can be reached only from this host.

    This is true for `ipc://`, and for `tcp://` with localhost or a loopback IP.

    Raises:
      ValueError: The address is neither `ipc://PATH` nor `tcp://HOST:PORT`.
    """
    scheme, _, rest = address.partition("://")
    is_text = not _INVALID.search(address)
    if scheme == "ipc" and rest and is_text:
        return True
    host, _, port = rest.rpartition(":")
    has_host = host.lstrip("[")[:1] not in ("", "]", "%")
    has_host &= host.startswith("[") or ":" not in host  # an IPv6 address
    is_tcp = scheme == "tcp" and has_host and is_text
    if not (is_tcp and _PORT.fullmatch(port) and int(port) < 65536):
        raise ValueError(
            f"expected an address like tcp://127.0.0.1:5555 or ipc:///path; "
            f"got {address!r}{_remedy(address)}"
        )
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a host name, an interface or *, which other hosts may reach


def _remedy(address: str) -> str:
    """Return the remedy for a common mistake in an address; "" for other mistakes."""
    with contextlib.suppress(ValueError):
        ipaddress.IPv6Address(address.removeprefix("tcp://"))
        return "; write an IPv6 address in brackets: [::1]:5555"
    port = address.rpartition(":")[2]
    is_large = _PORT.fullmatch(port) and int(port) > 65535
    return "; the largest port is 65535" if is_large else ""


def is_known_host(header: str, names: Collection[str]) -> bool:
    """Return whether the Host header of an HTTP request contains a known name or an IP.

    Another site can make its own name resolve to this host (DNS rebinding), but it
    cannot do that with an IP address, so all IP addresses are allowed.

    Args:
      header: Value of the header: a host, and possibly a port.
      names: Known names, in lower case.
    """
    name = re.sub(r":\d+$", "", header).strip("[]").lower()
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name in names
