"""A user's key folder: the files `server.key`, `client.key`, `clients` and `servers`.

`servers` contains the pinned keys of servers, one line each:

    tcp://sim1:5555,tcp://10.0.0.7:5555   envserve-public-1.8fK...   as=trainer-1

A pin for `tcp://*:5555` applies to all servers of a cluster, whatever their addresses.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from envserve.address import NamedAddress, is_local_address
from envserve.errors import (
    CodecError,
    ConnectError,
    KeyFileError,
    raise_if_from_handler,
)
from envserve.keys import formats, private_files
from envserve.keys.key_pair import CurveKeys, KeyPair
from envserve.keys.private_files import display_path

if TYPE_CHECKING:
    from envserve.keys.clients_file import ClientsFile


#: Role for which a key is used.
Role = Literal["server", "client"]


def _unknown_server_text(address: str) -> str:
    """Return the error message for a server whose key is not pinned."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    remedy = f'"envserve invite NAME --at {address}" on {host} and "envserve join" here'
    if address.startswith("ray://"):
        command = f'"envserve keys make DIR server NAME --at {address}"'
        remedy = f"{command}, and copy the key folders to the nodes and to this host"
    return (
        f"{address}: no key of this server is known here, so its identity cannot be "
        f"checked; run {remedy}"
    )


class UnknownServerKey(ConnectError):
    """No key is pinned for a server."""


class KeyFolder:
    """Reads and writes the files of a key folder; creates files only on request."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Choose the folder; nothing is read or created yet.

        Args:
          path: The folder; by default the environment variable ENVSERVE_HOME, or
            ~/.config/envserve.

        Raises:
          KeyFileError: There is no home folder.
        """
        path = path or os.environ.get("ENVSERVE_HOME") or "~/.config/envserve"
        try:
            self.path = Path(path).expanduser()
        except RuntimeError:
            raise KeyFileError(
                "cannot determine the home folder; set ENVSERVE_HOME"
            ) from None

    def key(self, role: Role) -> KeyPair | None:
        """Return this user's key pair for a role, or None if there is none yet.

        Raises:
          KeyFileError: The file cannot be read, or other users can read it.
        """
        path = self.path / f"{role}.key"
        command = "envserve keys new" + (" client" if role == "client" else "")
        text = private_files.read_private(
            path, f", and create a new one if others may have read it: {command}"
        )
        if text is None:
            return None
        lines = [line for line in text.split("\n") if line and line[0] != "#"]
        try:
            return KeyPair.from_secret(
                formats.decode(formats.SECRET, "".join(lines).strip())
            )
        except CodecError as error:
            raise KeyFileError(
                f"{display_path(path)}: {error}; restore it, or run {command}"
            ) from None

    def ensure_key(self, role: Role) -> KeyPair:
        """Return this user's key pair for a role; create it if there is none."""
        if (pair := self.key(role)) is None:
            with private_files.locked(self.path):
                pair = self.key(role) or self.new_key(role)
        return pair

    def new_key(self, role: Role) -> KeyPair:
        """Write and return a new key pair, replacing the old one.

        Raises:
          KeyFileError: The file cannot be written.
        """
        pair = KeyPair.generate()
        self.write_key(role, pair)
        return pair

    def write_key(self, role: Role, pair: KeyPair) -> None:
        """Write a key pair, replacing the old one; see `new_key` for the errors."""
        private_files.make_folder(self.path)
        today = datetime.datetime.now(datetime.UTC).date()
        private_files.write_private(
            self.path / f"{role}.key",
            f"# envserve key, {today}; keep it secret: it identifies you\n"
            f"{formats.encode(formats.SECRET, pair.secret)}\n",
        )

    @cached_property
    def clients(self) -> ClientsFile:
        """The authorised clients of this user's servers.

        They include this user, whose key is `client.key`.
        """
        # Imported lazily, because a health probe does not need this module.
        from envserve.keys.clients_file import ClientsFile

        pair = self.key("client")
        return ClientsFile(self.path / "clients", pair.public if pair else None)

    def keys_for(self, address: str, *, insecure: bool = False) -> CurveKeys | None:
        """Return the server's public key and the client's key pair, for a connection.

        Returns None for ipc, where the operating system identifies users. If no key is
        pinned for an address of this host, the server is assumed to be this user's own.
        On loopback, keys that this user does not have yet are created.

        Args:
          address: Address of the server; the key of a `NamedAddress` may be pinned
            under its name.
          insecure: Whether to connect without keys if no key is pinned for this
            address. A server whose key is pinned is never contacted without keys.

        Returns:
          The keys, or None for a connection without keys.

        Raises:
          UnknownServerKey: No key is pinned for the server.
          ConnectError: The address is not valid.
          KeyFileError: A file cannot be read.
        """
        if address.startswith("ipc://"):
            _check_socket_owner(address.removeprefix("ipc://"))
            return None
        pin = self.pinned_key(address)
        if pin is None and insecure:
            return None
        try:
            if pin is None and is_local_address(address):
                pin = self.ensure_key("server").public
            elif pin is None and (server_key := self.key("server")) is not None:
                pin = server_key.public if is_own_address(address) else None
        except ValueError as error:
            raise ConnectError(str(error)) from None
        if pin is None:
            raise UnknownServerKey(_unknown_server_text(_names_of(address)[-1]))
        return pin, self.ensure_key("client")

    @property
    def pinned_addresses(self) -> list[str]:
        """The addresses of the servers whose keys are pinned.

        Raises:
          KeyFileError: The file cannot be read or is not valid.
        """
        return list(self._pins())

    def pinned_key(self, address: str) -> bytes | None:
        """Return the pinned public key of a server, or None.

        A pin for the address, or for the name of a `NamedAddress`, takes precedence
        over a pin with a wildcard.

        Raises:
          KeyFileError: The file cannot be read or is not valid.
        """
        pins, names = self._pins(), [*map(_in_lower_case, _names_of(address))]
        patterns = [p for p in pins if "*" in p for n in names if fnmatchcase(n, p)]
        matches = [n for n in names if n in pins] + patterns
        return pins[matches[0]][0] if matches else None

    def check_pins(self, addresses: Sequence[str], public: bytes) -> None:
        """Raise KeyFileError if another key is pinned for one of these addresses."""
        for address in addresses:
            pinned = self.pinned_key(address)
            if pinned is not None and pinned != public:
                raise KeyFileError(
                    f"{address}: the key of another server "
                    f"({formats.fingerprint(pinned)}) is recorded for this address in "
                    f"{display_path(self.path / 'servers')}; expected the key in "
                    f"the invitation ({formats.fingerprint(public)}). Nothing was "
                    f"changed, and the invitation is still valid. If the server was "
                    f"set up again, run: envserve join --replace"
                )

    def add_pin(
        self,
        addresses: Sequence[str],
        public: bytes,
        name: str,
        *,
        may_replace: bool = True,
    ) -> None:
        """Pin a server's key.

        Args:
          addresses: Addresses of the server.
          public: Raw public key of the server.
          name: Name of this client on the server.
          may_replace: Whether to replace other keys that are pinned for these
            addresses.

        Raises:
          KeyFileError: The file cannot be read or changed, or `may_replace` is False
            and another key is pinned for one of the addresses.
        """
        with private_files.locked(self.path):
            if not may_replace:
                self.check_pins(addresses, public)
            pin = public, f"as={name}"
            pins = self._pins() | dict.fromkeys(map(_in_lower_case, addresses), pin)
            lines = (
                f"{address} {formats.encode(formats.PUBLIC, public)} {options}\n"
                for address, (public, options) in pins.items()
            )
            private_files.write_private(self.path / "servers", "".join(lines))

    def _pins(self) -> dict[str, tuple[bytes, str]]:
        """Return a dict from each pinned address to its raw public key and options."""
        path = self.path / "servers"
        pins: dict[str, tuple[bytes, str]] = {}
        lines = (private_files.read_private(path) or "").splitlines()
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split(maxsplit=2)
            if not words:
                continue
            try:
                pin = (
                    formats.decode(formats.PUBLIC, "".join(words[1:2])),
                    "".join(words[2:]),
                )
            except CodecError as error:
                raise KeyFileError(
                    f"{display_path(path)}, line {number}: expected addresses "
                    f"and a public key; {error}"
                ) from None
            pins |= dict.fromkeys(map(_in_lower_case, words[0].split(",")), pin)
        return pins

    def __repr__(self) -> str:
        return f"<KeyFolder {self.path}>"


def _in_lower_case(address: str) -> str:
    """Return a tcp:// address in lower case, because host names ignore case."""
    return address.lower() if address.startswith("tcp://") else address


def _names_of(address: str) -> list[str]:
    """Return an address and, if it was resolved from a name, the name."""
    return [address, address.name] if isinstance(address, NamedAddress) else [address]


def _check_socket_owner(path: str) -> None:
    """Raise ConnectError if a socket belongs to another user."""
    try:
        owner = os.stat(path).st_uid
    except OSError as error:  # an abstract socket, or one that does not exist yet
        raise_if_from_handler(error)
        return
    if owner != os.geteuid():
        raise ConnectError(
            f"ipc://{path}: expected a socket of this user (uid {os.geteuid()}); got "
            f"one of uid {owner}; use tcp:// for other users' servers"
        )


def is_own_address(address: str) -> bool:
    """Return whether a tcp:// address contains a name or an IP address of this host.

    A host name is looked up, which may block until the name server replies.
    """
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, *_, socket_address in candidates:
            with socket.socket(family, kind) as probe:
                probe.bind(socket_address)  # fails for an IP address of another host
    except UnicodeError:  # a DNS label is empty or too long
        return False
    except OSError as error:
        raise_if_from_handler(error)
        return False
    return True
