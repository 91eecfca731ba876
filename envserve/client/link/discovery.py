"""Where servers are: words that stand for addresses, maybe for others at each look."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Final

from envserve import ray
from envserve.address import NamedAddress, complete_address
from envserve.errors import AddressError

#: How words begin that may stand for other servers at each look.
SOURCES: Final = ("dns://", "file://", "ray://")


def resolve(word: str) -> tuple[str, ...]:
    """Returns the addresses that a word stands for now, with scheme and port.

    Args:
      word: An address, as for `complete_address`; or a source of addresses:
        `dns://host:port` for a server at every address of a name, `file:///path` for
        a file with one address per line, `ray://namespace/name` for servers that run
        in Ray.

    Raises:
      AddressError: It is no such word, nobody knows the host, or there is no address.
    """
    if word.startswith("file://"):
        return _in_file(word, word.removeprefix("file://"))
    if word.startswith("ray://"):
        found = ray.addresses(*ray.parse(word))
        return tuple(NamedAddress(address, word) for address in found)
    return _by_name(word)


def _by_name(word: str) -> tuple[str, ...]:
    by_name = complete_address(word)
    if by_name.startswith("ipc://"):
        return (by_name,)
    name, _, port = by_name.removeprefix("tcp://").rpartition(":")
    name = name.strip("[]")
    try:
        found = {str(ipaddress.ip_address(name))}
    except ValueError:
        try:
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # that one of an empty or long label
            raise AddressError(
                f"cannot resolve {name}; is it spelled right, and does this network "
                f"know it? ({getattr(error, 'strerror', None) or error})"
            ) from None
        found = {str(address[0]) for *_, address in known}
    if not word.startswith("dns://"):
        return (by_name,)
    hosts = (f"[{ip}]" if ":" in ip else ip for ip in sorted(found))
    return tuple(NamedAddress(f"tcp://{host}:{port}", by_name) for host in hosts)


def _in_file(word: str, path: str) -> tuple[str, ...]:
    """Returns those of the lines; hosts are looked up by who connects to them."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        text = f"{word!r:.200}: expected a file of addresses, one a line; {error}"
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
        raise AddressError(f"{word}: expected an address a line; the file has none")
    return tuple(dict.fromkeys(found))
