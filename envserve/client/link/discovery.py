"""Resolve the addresses of servers from DNS, a file or Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from envserve import ray
from envserve.address import NamedAddress, complete_address
from envserve.client.link.zmq_guards.resolver import resolve_host
from envserve.errors import AddressError, raise_if_from_handler
from envserve.regular_file import open_regular

#: Schemes of address sources, whose addresses may change over time.
SOURCE_SCHEMES: Final = ("dns://", "file://", "ray://")
_MAX_FILE_BYTES: Final = 16 << 20


def resolve(source: str) -> tuple[str, ...]:
    """Return the addresses that a source currently lists, with scheme and port.

    Args:
      source: An address, as for `complete_address`; or a source of addresses:
        `dns://host:port` for all IP addresses of a host name, `file:///path` for a file
        with one address per line, `ray://namespace/name` for servers that run in Ray.
        An address that was already resolved from a source is returned unchanged,
        because the server's key may be pinned under the name of the source.

    Raises:
      AddressError: The source is malformed, the host is unknown, or no address is
        listed.
    """
    if isinstance(source, NamedAddress):
        return (source,)
    if source.startswith("file://"):
        return _from_file(source, source.removeprefix("file://"))
    if source.startswith("ray://"):
        found = ray.addresses(*ray.parse(source))
        return tuple(NamedAddress(address, source) for address in found)
    return _from_name(source)


def _from_name(source: str) -> tuple[str, ...]:
    by_name = complete_address(source)
    try:
        found = resolve_host(by_name)
    except (OSError, UnicodeError) as error:  # UnicodeError: empty or long label
        raise_if_from_handler(error)
        name = by_name.removeprefix("tcp://").rpartition(":")[0]
        raise AddressError(
            f"cannot resolve {name}; check its spelling and the DNS of this "
            f"network ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not source.startswith("dns://"):
        return (by_name,)
    found.sort(key=lambda address: address.rpartition(":")[0])
    return tuple(NamedAddress(address, by_name) for address in found)


def _from_file(source: str, path: str) -> tuple[str, ...]:
    """Return the addresses in a file, without resolving their host names."""
    try:
        with open_regular(Path(path), _MAX_FILE_BYTES) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise_if_from_handler(error)
        text = f"{source!r:.200}: expected a file with one address per line; {error}"
        raise AddressError(text) from None
    texts = [line.partition("#")[0].strip() for line in lines]
    found = []
    for number, text in enumerate(texts, 1):
        try:
            if text.startswith("dns://"):
                raise AddressError(f"expected one address; got {text!r:.200}")
            found += [complete_address(text)] if text else []
        except AddressError as error:
            raise AddressError(f"{path}:{number}: {error}") from None
    if not found:
        raise AddressError(f"{source}: expected an address per line; the file is empty")
    return tuple(dict.fromkeys(found))
