"""The file `clients`: who may use a server, read again whenever it has changed.

A file that cannot be read changes nothing: who was known before stays known, and the
log says so. Commands and the server change it a line at a time; comments stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from envserve.errors import CodecError, KeyFileError, RemoteProtocolError
from envserve.keys import private_files
from envserve.keys.grant import Grant, format_line, parse_line
from envserve.keys.private_files import display_path

__all__ = ["ClientsFile"]

_LOGGER: Final = logging.getLogger(__name__)

_HEADER: Final = "# name       public key        what it may: docs/security.md"


class ClientsFile:
    """The clients of a server, and the invitations to it.

    Attributes:
      is_current: Whether what is known is what the file says.
    """

    def __init__(self, path: Path, local_public: bytes | None = None) -> None:
        """Reads nothing yet.

        Args:
          path: The file, which need not exist.
          local_public: Public key of the user who runs the server, called "local", who
            may do everything.
        """
        self._path = path
        self._local_public = local_public
        self._lines: list[tuple[str, Grant | None]] = []
        self._seen = (0, 0, 0, 0)
        self._trouble = ""
        self.is_current = True

    def find(self, public: bytes, now: float) -> Grant | None:
        """Returns what a key may at seconds since 1970; None if it is not known."""
        if public == self._local_public:
            return Grant(name="local", public=public)
        return next((g for g in self.grants(now) if g.public == public), None)

    def grants(self, now: float = -float("inf")) -> list[Grant]:
        """Returns all that hold at seconds since 1970; without those, all."""
        self._refresh()
        return [grant for _, grant in self._lines if grant and grant.holds(now)]

    def read(self) -> None:
        """Reads the file; raises KeyFileError, and then everything is as before."""
        text = private_files.read_private(self._path)
        if text is None and self._lines:
            raise KeyFileError(f"{display_path(self._path)} is gone")
        if self._lines and not (text or "").endswith("\n"):
            raise KeyFileError(
                f"{display_path(self._path)}: expected lines that end; got "
                "none, or half of one; is it being written?"
            )
        lines: list[tuple[str, Grant | None]] = []
        found: set[object] = set()
        for number, line in enumerate((text or "").splitlines(), 1):
            try:
                grant = parse_line(line)
                if grant and found & (ids := {grant.public, _slot(grant)}):
                    raise CodecError("expected each name and each key once")
            except CodecError as error:
                where = f"{display_path(self._path)}, line {number}"
                raise KeyFileError(f"{where}: {error}") from None
            lines.append((line, grant))
            found |= ids if grant else set()
        self._lines = lines

    def add(self, grant: Grant, now: float) -> None:
        """Writes a client or an invitation, in place of one of the same name.

        Expired invitations go. Raises KeyFileError, as do `remove` and `enrol`.
        """
        with private_files.locked(self._path.parent):
            self.read()
            self._change(
                lambda old: (
                    _slot(old) == _slot(grant)
                    or (old.is_invitation and not old.holds(now))
                ),
                grant,
            )

    def remove(self, name: str) -> bool:
        """Takes a name's key and invitation away; tells whether there was one."""
        with private_files.locked(self._path.parent):
            self.read()
            if not any(grant and grant.name == name for _, grant in self._lines):
                return False
            self._change(lambda old: old.name == name)
            return True

    def enrol(self, invitation: bytes, public: bytes, now: float) -> Grant | None:
        """Puts a client's public key in the place of its invitation's.

        Returns:
          What the key may from now on, or None if there is no such invitation.

        Raises:
          RemoteProtocolError: The key is another client's, whose name was not invited.
          KeyFileError: The file cannot be changed.
        """
        with private_files.locked(self._path.parent):
            self.read()
            invited = self.find(invitation, now)
            if invited is None or not invited.is_invitation:
                return None
            same = self.find(public, -float("inf"))
            if same is not None and same.name != invited.name:
                raise RemoteProtocolError(
                    f"this client's key is known here as {same.name}; use it as it is, "
                    f"or first: envserve clients remove {same.name}"
                )
            grant = replace(invited, public=public, until=None)
            self._change(lambda old: old.name == grant.name, grant)
            return grant

    def _change(self, drops: Callable[[Grant], bool], new: Grant | None = None) -> None:
        lines = [line for line, old in self._lines if old is None or not drops(old)]
        lines = lines or [_HEADER]
        if new is not None:
            lines.append(format_line(new))
        private_files.write_private(self._path, "".join(f"{line}\n" for line in lines))
        self.read()

    def _refresh(self) -> None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
            seen = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            seen = (error.errno or 0, 0, 0, 0)
        if seen == self._seen:
            return
        try:
            self.read()
            self._seen, self._trouble, self.is_current = seen, "", True
        except KeyFileError as error:  # what is wrong need not be the file
            if str(error) != self._trouble:
                _LOGGER.error("%s; the clients known before stay known", error)
            self._trouble, self.is_current = str(error), False


def _slot(grant: Grant) -> tuple[str, bool]:
    """A name has at most one key and one invitation, which may replace that key."""
    return grant.name, grant.is_invitation
