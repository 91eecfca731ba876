"""Listening sockets that libzmq accepts from, but does not own.

An address that libzmq has bound itself is not free again at once when its socket is
closed, and libzmq aborts the process if no descriptor is left for it to bind.
"""

from __future__ import annotations

import contextlib
import os
import socket as socketlib
import stat
from pathlib import Path
from typing import Final

from envserve.errors import ServerError

_BACKLOG: Final = 128


def listen(address: str) -> tuple[socketlib.socket, str]:
    """Return a socket that listens on an address, and the address with its real port.

    Raises:
      ServerError: The address cannot be used.
    """
    scheme, _, rest = address.partition("://")
    family, remedy = socketlib.AF_INET, "is another server running there?"
    if scheme == "ipc":
        family, remedy = socketlib.AF_UNIX, "name a path in a folder of yours"
    elif "[" in rest:
        family = socketlib.AF_INET6
    listener = socketlib.socket(family)
    listener.setblocking(False)
    try:
        if scheme == "ipc":
            _bind_file(listener, rest)
        else:
            host, _, port = rest.rpartition(":")
            listener.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_REUSEADDR, 1)
            listener.bind(("" if host == "*" else host.strip("[]"), int(port)))
            number, port = listener.getsockname()[:2]
            address = (
                f"tcp://[{number}]:{port}" if "[" in rest else f"tcp://{number}:{port}"
            )
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise ServerError(f"cannot listen on {address}: {why}; {remedy}") from None
    return listener, address


def _bind_file(listener: socketlib.socket, path: str) -> None:
    """Bind to a path, whose file only this user can use, whatever the umask is."""
    if path[0] == "@":  # no file at all
        listener.bind(f"\0{path[1:]}")
        return
    _make_way(Path(path))
    umask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(umask)


def _make_way(path: Path) -> None:
    """Remove the socket file of a server that has ended; create its folder.

    Raises:
      OSError: The path is in use, or is not a socket.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("expected no file there, or the socket of a server that is gone")
    if found.st_uid != os.geteuid():
        raise OSError(f"the socket there is that of user {found.st_uid}")
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError("another server answers there")
    path.unlink()
