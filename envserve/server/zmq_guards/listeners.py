"""Creates listening sockets, on which libzmq accepts connections.

If libzmq bound the addresses itself, an address would remain in use for a while after
its socket is closed, and libzmq would abort the process if no descriptor was free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as socketlib
import stat
from pathlib import Path
from typing import Final

from envserve.errors import ServerError

#: Maximum number of connections that the kernel queues for each address.
_BACKLOG: Final = 128


def listen(address: str) -> tuple[socketlib.socket, str]:
    """Listen on an address; return the socket, and the address with the actual port.

    Raises:
      ServerError: The address cannot be used.
    """
    scheme, _, rest = address.partition("://")
    family = socketlib.AF_INET
    remedy = "choose an address of this host and a free port; port 0 selects one"
    if scheme == "ipc":
        family = socketlib.AF_UNIX
        remedy = "choose a short, unused path in a folder that you own"
    elif "[" in rest:
        family = socketlib.AF_INET6
    listener = None
    try:
        listener = socketlib.socket(family)  # fails if the host has no IPv6
        listener.setblocking(False)
        if scheme == "ipc":
            _bind_file(listener, rest)
        else:
            host, _, port = rest.rpartition(":")
            listener.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_REUSEADDR, 1)
            if family == socketlib.AF_INET6:
                number, _, zone = host.strip("[]").partition("%")
                listener.bind((number, int(port), 0, _interface_of(zone)))
            else:
                listener.bind(("" if host == "*" else host, int(port)))
                host = listener.getsockname()[0]
            address = f"tcp://{host}:{listener.getsockname()[1]}"
        listener.listen(_BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: a name that IDNA cannot encode
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if is_in_use and scheme == "tcp":
            remedy = (
                "stop the program that uses this port, or choose another port; port 0 "
                "selects a free one"
            )
        raise ServerError(f"cannot listen on {address}: {reason}; {remedy}") from None
    return listener, address


def close_listener(listener: socketlib.socket) -> None:
    """Close a socket of `listen`, and remove its file if it has one."""
    path = listener.getsockname()
    # The file still belongs to this socket, because no other server replaces the file
    # while the socket is open.
    if listener.family == socketlib.AF_UNIX and isinstance(path, str):
        with contextlib.suppress(OSError):  # removed already, or in a read-only folder
            os.unlink(path)
    listener.close()


def _interface_of(zone: str) -> int:
    """Return the number of a network interface; 0 for an address without a zone.

    Args:
      zone: Number or name of the interface, the part of an IPv6 address after %.
    """
    if not zone:
        return 0
    is_number = zone.isdecimal() and len(zone) < 10  # longer numbers do not exist
    return int(zone) if is_number else socketlib.if_nametoindex(zone)


def _bind_file(listener: socketlib.socket, path: str) -> None:
    """Bind to a path whose file only this user can access, regardless of the umask."""
    if path[0] == "@":  # an abstract socket, which has no file
        listener.bind(f"\0{path[1:]}")
        return
    _remove_stale_socket(Path(path))
    umask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(umask)


def _remove_stale_socket(path: Path) -> None:
    """Create the path's folder; remove the socket of a server that no longer runs.

    Raises:
      OSError: The path is in use, is not a socket, or belongs to another user.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        stat_result = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(stat_result.st_mode):
        raise OSError("the path is an existing file that is not a socket")
    if stat_result.st_uid != os.geteuid():
        raise OSError(f"the socket at this path belongs to user {stat_result.st_uid}")
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError("another server listens at this path")
    path.unlink()
