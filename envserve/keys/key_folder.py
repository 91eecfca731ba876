"""The folder of a user's keys: `server.key`, `client.key`, `clients` and `servers`.

`servers` holds the pins, a line each:

    tcp://sim1:5555,tcp://10.0.0.7:5555   envserve-public-1.8fK...   as=trainer-1

A pin of `tcp://*:5555` is that of all servers of a cluster, whatever their addresses.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from envserve.address import NamedAddress, is_private
from envserve.errors import CodecError, ConnectError, KeyFileError
from envserve.keys import formats, private_files
from envserve.keys.key_pair import KeyPair, Keys
from envserve.keys.private_files import display_path

if TYPE_CHECKING:
    from envserve.keys.clients_file import ClientsFile

__all__ = ["KeyFolder", "Role", "unknown_server"]

#: What a key is used as.
Role = Literal["server", "client"]


def unknown_server(address: str) -> str:
    """Says that a server's key is needed, and how to get it."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return (
        f"{address}: no key of that server is known here, so it could be anybody's; "
        f'run "envserve invite NAME" on {host} and "envserve join" here'
    )


class KeyFolder:
    """Reads and writes the files; nothing is made that was not asked for."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Touches nothing yet.

        Args:
          path: By default ENVSERVE_HOME of the environment, else ~/.config/envserve.
        """
        path = path or os.environ.get("ENVSERVE_HOME") or "~/.config/envserve"
        try:
            self.path = Path(path).expanduser()
        except RuntimeError:
            raise KeyFileError("no home folder is known; set ENVSERVE_HOME") from None

    def key(self, role: Role) -> KeyPair | None:
        """Returns this user's key as a server, or as a client; None if none is made."""
        path = self.path / f"{role}.key"
        word = "" if role == "server" else " client"
        text = private_files.read_private(
            path,
            ", and make a new one if somebody may have read it: "
            f"envserve keys new{word}",
        )
        if text is None:
            return None
        lines = [line for line in text.split("\n") if line and line[0] != "#"]
        try:
            return KeyPair.of(formats.decode(formats.SECRET, "".join(lines).strip()))
        except CodecError as error:
            raise KeyFileError(f"{display_path(path)}: {error}") from None

    def ensure_key(self, role: Role) -> KeyPair:
        """Return the same key, and make it first if there is none."""
        if (pair := self.key(role)) is None:
            with private_files.locked(self.path):
                pair = self.key(role) or self.new_key(role)
        return pair

    def new_key(self, role: Role) -> KeyPair:
        """Writes a new key, in place of what is there; raises KeyFileError."""
        private_files.make_folder(self.path)
        pair = KeyPair.make()
        today = datetime.datetime.now(datetime.UTC).date()
        private_files.write_private(
            self.path / f"{role}.key",
            f"# envserve key, {today}; whoever has it is you\n"
            f"{formats.encode(formats.SECRET, pair.secret)}\n",
        )
        return pair

    @cached_property
    def clients(self) -> ClientsFile:
        """Who may use this user's servers; the user may, by `client.key`."""
        from envserve.keys.clients_file import (
            ClientsFile,  # which a probe does not need
        )

        own = self.key("client")
        return ClientsFile(self.path / "clients", own.public if own else None)

    def keys_for(self, address: str, *, insecure: bool = False) -> Keys | None:
        """Returns what a client needs for a server: its public key, and an own pair.

        None for ipc, where the system knows who is who. On loopback, where nothing was
        noted, the server is this user's; keys of this user that are missing are made.

        Args:
          address: The server's; of a `NamedAddress` the key may be noted by name.
          insecure: Whether to use no keys, unless one was noted for just this address:
            a server that had a key is never spoken to without.

        Raises:
          ConnectError: It was never joined, or the address has no known form.
          KeyFileError: A file cannot be read.
        """
        if address.startswith("ipc://"):
            _check_owner(address.removeprefix("ipc://"))
            return None
        name = address.name if isinstance(address, NamedAddress) else address
        pin = self.pinned_key(address) or self.pinned_key(name)
        if pin is None and insecure:
            return None
        try:
            if pin is None and is_private(address):
                pin = self.ensure_key("server").public
        except ValueError as error:
            raise ConnectError(str(error)) from None
        if pin is None:
            raise ConnectError(unknown_server(name))
        return pin, self.ensure_key("client")

    @property
    def addresses(self) -> list[str]:
        """Servers whose key was noted; raises KeyFileError."""
        return list(self._pins())

    def pinned_key(self, address: str) -> bytes | None:
        """Returns the key that was noted of a server; raises KeyFileError."""
        pins = self._pins()
        fitting = (p for p in pins if "*" in p and fnmatchcase(address, p))
        noted = pins.get(address) or pins.get(next(fitting, ""))
        return noted[0] if noted else None

    def add_pin(self, addresses: Sequence[str], public: bytes, name: str) -> None:
        """Notes a server's key, and what this client is called there.

        It takes the place of what was noted of those addresses. Raises KeyFileError.
        """
        with private_files.locked(self.path):
            pins = self._pins() | dict.fromkeys(addresses, (public, f"as={name}"))
            lines = (
                f"{address} {formats.encode(formats.PUBLIC, public)} {rest}\n"
                for address, (public, rest) in pins.items()
            )
            private_files.write_private(self.path / "servers", "".join(lines))

    def _pins(self) -> dict[str, tuple[bytes, str]]:
        """Returns address -> public key, and the rest of the line."""
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
            pins |= dict.fromkeys(words[0].split(","), pin)
        return pins

    def __repr__(self) -> str:
        return f"<KeyFolder {self.path}>"


def _check_owner(path: str) -> None:
    """Raises ConnectError for a socket of another user, who may be anybody."""
    try:
        owner = os.stat(path).st_uid
    except OSError:  # an abstract one, or there is none yet
        return
    if owner != os.geteuid():
        raise ConnectError(
            f"ipc://{path}: expected a socket of this user's own (uid {os.geteuid()}); "
            f"got one of uid {owner}; use tcp:// for servers of others"
        )
