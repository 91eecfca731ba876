"""`envserve keys make` and `keys new`, and helper functions for all key commands."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from envserve.cli.program import Option
from envserve.cli.terminal import fail
from envserve.errors import AddressError, CodecError, EnvserveError, KeyFileError
from envserve.keys import formats
from envserve.keys.grant import Grant, parse_words
from envserve.keys.key_folder import KeyFolder, Role
from envserve.keys.key_pair import KeyPair

_AT_HELP: Final = (
    "Address at which clients reach the server: HOST, HOST:PORT or tcp://HOST:PORT; "
    "repeatable."
)
_HOME_HELP: Final = (
    "Key folder; by default $ENVSERVE_HOME, or ~/.config/envserve if that is not set."
)
#: Characters that an address may have in an invitation and in the file `servers`, where
#: others would separate addresses or start a comment.
_PLAIN: Final = re.compile(r"[\w.:\[\]%*/-]+", re.ASCII)

At = Annotated[list[str], Option(_AT_HELP, metavar="ADDRESS")]
Home = Annotated[Path | None, Option(_HOME_HELP)]


def make(
    dir_: Path,
    roles: Annotated[list[str], Option(metavar="ROLE")],
    *,
    at: At,
) -> None:
    """Create key folders for a server and its clients, to copy to their hosts.

    Mount each folder where its role runs, and set ENVSERVE_HOME to it. The server's
    folder contains its keys and the list of its clients; a client's folder contains its
    own key and the server's public key. The folder of the role `local` is for programs
    that act as the server's user, such as the web page; it does not contain the
    server's secret key. If several servers share a key folder, `--at 'tcp://*:5555'`
    matches all their addresses, and `--at ray://NAMESPACE/NAME` those of servers on a
    Ray cluster.

    Args:
      dir_: Folder to create the key folders in; it need not exist.
      roles: Role: server, local, or the name of a client.
    """
    with key_errors():
        at = complete_addresses(at, may_be_any=True)
        names = [role for role in roles if role not in ("server", "local")]
        placeholder = formats.encode(formats.PUBLIC, bytes(32))
        for name in names:
            parse_words([name, placeholder])  # rejects invalid names, such as paths
        server = KeyFolder(dir_ / "server")
        key = server.ensure_key("server")
        local_key = server.ensure_key("client")  # for health probes on its host
        server.clients.read()
        server.add_pin(at, key.public, "server")  # to reach servers on other hosts
        if "local" in roles:
            local = KeyFolder(dir_ / "local")
            if local.key("client") != local_key:
                local.write_key("client", local_key)
            local.add_pin(at, key.public, "local")
        for name in names:
            client = KeyFolder(dir_ / name)
            pair = client.key("client")
            # The key and the pin are written last, so a folder with both is complete.
            # Do not write the client's line in `clients` again, because the operator
            # may have changed or removed it.
            if not (pair and client.pinned_addresses):
                pair = pair or KeyPair.generate()
                old = server.clients.find_name(name, -math.inf)
                old = old or Grant(name=name, public=pair.public)
                server.clients.add(replace(old, public=pair.public), time.time())
                client.write_key("client", pair)
            client.add_pin(at, key.public, name)
    print(f"{dir_}: {' '.join(sorted(path.name for path in dir_.iterdir()))}")


def new(
    role: Role = "server",
    *,
    home: Home = None,
) -> None:
    """Replace your server key or client key; the other side must accept the new key.

    Args:
      role: Key to replace: server or client.
    """
    with key_errors():
        pair = KeyFolder(home).new_key(role)
    print(f"new {role} key: {formats.fingerprint(pair.public)}")
    if role == "server":
        print(
            "Restart the servers that use the old key. Clients reject the new key "
            "until they join again: envserve invite NAME --at ADDRESS, and on each "
            "client: envserve join --replace"
        )
    else:
        print(
            "Restart your servers: they accept the old key until then. Other users' "
            "servers reject the new key. On each of them, run: envserve clients remove "
            "NAME, envserve invite NAME --at ADDRESS; then run here: envserve join"
        )


@contextlib.contextmanager
def key_errors() -> Iterator[None]:
    """Print an error and exit: with 2 for invalid values or key files, otherwise 1."""
    try:
        yield
    except EnvserveError as error:
        fail(error, 2 if isinstance(error, CodecError | KeyFileError) else 1)


def complete_addresses(values: list[str], *, may_be_any: bool = False) -> list[str]:
    """Return values of --at as complete addresses that clients can connect to.

    Args:
      values: Values of --at.
      may_be_any: Whether hosts with `*`, which match several hosts, and ray://
        addresses are allowed.

    Raises:
      CodecError: An address is invalid, or clients cannot connect to it.
    """
    from envserve import ray
    from envserve.address import complete_address

    addresses = []
    try:
        for value in values:
            if value.startswith("ray://"):
                ray.parse(value)
                addresses.append(value)
            else:
                addresses.append(complete_address(value))
    except AddressError as error:
        raise CodecError(f"--at: {error}") from None
    for value, address in zip(values, addresses, strict=True):
        if not _PLAIN.fullmatch(address):
            raise CodecError(
                f"--at: expected the address of one server, with a host of ASCII "
                f"letters, digits and . _ - or an IP address; got {value!r:.200}; "
                f"repeat --at for several addresses"
            )
        scheme, _, rest = address.partition("://")
        host = rest.rpartition(":")[0]
        is_any = scheme == "ray" or "*" in host
        if (
            scheme == "ipc"
            or host in ("0.0.0.0", "[::]")
            or (is_any and not may_be_any)
        ):
            raise CodecError(
                f"--at: expected the tcp:// address at which clients reach the server; "
                f"got {value!r:.200}"
            )
    return addresses
