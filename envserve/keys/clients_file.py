"""The `clients` file: a server's authorised clients, read again when it changes.

If the file cannot be read, the clients from the last successful read stay authorised,
and the error is logged. Commands and the server change single lines; comments are
preserved.
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

_LOGGER: Final = logging.getLogger(__name__)

_HEADER: Final = "# name       public key        limits: see docs/security.md"


class ClientsFile:
    """The authorised clients of a server, and the invitations to it.

    Attributes:
      is_current: Whether the last attempt to read the file succeeded.
    """

    def __init__(self, path: Path, local_public: bytes | None = None) -> None:
        """Store the arguments; the file is read when it is first needed.

        Args:
          path: The file, which need not exist.
          local_public: Public key of the server's user; it is authorised without
            limits, under the name "local".
        """
        self._path = path
        self._local_public = local_public
        self._lines: list[tuple[str, Grant | None]] = []
        self._file_state = (0, 0, 0, 0)
        self._last_error = ""
        self.is_current = True

    def find(self, public: bytes, now: float) -> Grant | None:
        """Return the grant of a public key, or None if the key is not authorised.

        Args:
          public: Raw public key.
          now: Time in seconds since 1970.
        """
        if public == self._local_public:
            return Grant(name="local", public=public)
        return next((g for g in self.grants(now) if g.public == public), None)

    def grants(self, now: float = -float("inf")) -> list[Grant]:
        """Return the grants that have not expired at a given time.

        Args:
          now: Time in seconds since 1970; by default, expired grants are also returned.
        """
        self._read_if_changed()
        return [grant for _, grant in self._lines if grant and grant.is_valid(now)]

    def read(self) -> None:
        """Read the file.

        Raises:
          KeyFileError: The file cannot be read or is not valid; the grants do not
            change.
        """
        text = private_files.read_private(self._path)
        if text is None and self._lines:
            raise KeyFileError(f"{display_path(self._path)} no longer exists")
        if self._lines and not (text or "").endswith("\n"):
            raise KeyFileError(
                f"{display_path(self._path)} is empty, or its last line is incomplete; "
                "if another process is writing it, wait until it is done"
            )
        lines: list[tuple[str, Grant | None]] = []
        found: set[object] = set()
        for number, line in enumerate((text or "").splitlines(), 1):
            try:
                grant = parse_line(line)
                if grant and found & (ids := {grant.public, _unique_id(grant)}):
                    raise CodecError("expected each name and each key only once")
            except CodecError as error:
                where = f"{display_path(self._path)}, line {number}"
                raise KeyFileError(f"{where}: {error}") from None
            lines.append((line, grant))
            found |= ids if grant else set()
        self._lines = lines

    def add(self, grant: Grant, now: float) -> None:
        """Add a client or an invitation, replacing one with the same name.

        Expired invitations are removed.

        Raises:
          KeyFileError: The file cannot be read or changed.
        """
        with private_files.locked(self._path.parent):
            self.read()
            self._rewrite(
                lambda old: (
                    _unique_id(old) == _unique_id(grant)
                    or (old.is_invitation and not old.is_valid(now))
                ),
                grant,
            )

    def remove(self, name: str) -> bool:
        """Remove the key and the invitation of a name; return whether there was one.

        Raises:
          KeyFileError: The file cannot be read or changed.
        """
        with private_files.locked(self._path.parent):
            self.read()
            if not any(grant and grant.name == name for _, grant in self._lines):
                return False
            self._rewrite(lambda old: old.name == name)
            return True

    def enrol(self, invitation: bytes, public: bytes, now: float) -> Grant | None:
        """Replace an invitation's key with the client's own public key.

        Args:
          invitation: Raw public key of the invitation.
          public: Raw public key of the client.
          now: Time in seconds since 1970.

        Returns:
          The client's grant, or None if there is no valid invitation with this key.

        Raises:
          RemoteProtocolError: The key already belongs to a client of another name.
          KeyFileError: The file cannot be read or changed.
        """
        with private_files.locked(self._path.parent):
            self.read()
            invited = self.find(invitation, now)
            if invited is None or not invited.is_invitation:
                return None
            same = self.find(public, -float("inf"))
            if same is not None and same.name != invited.name:
                raise RemoteProtocolError(
                    f"this client's key is already known as {same.name}; use it under "
                    f"that name, or remove it first: envserve clients remove "
                    f"{same.name}"
                )
            grant = replace(invited, public=public, until=None)
            self._rewrite(lambda old: old.name == grant.name, grant)
            return grant

    def _rewrite(
        self, is_replaced: Callable[[Grant], bool], new: Grant | None = None
    ) -> None:
        lines = [
            line for line, old in self._lines if old is None or not is_replaced(old)
        ]
        lines = lines or [_HEADER]
        if new is not None:
            lines.append(format_line(new))
        private_files.write_private(self._path, "".join(f"{line}\n" for line in lines))
        self.read()

    def _read_if_changed(self) -> None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
            seen = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            seen = (error.errno or 0, 0, 0, 0)
        if seen == self._file_state:
            return
        try:
            self.read()
            self._file_state, self._last_error, self.is_current = seen, "", True
        # The cause may be outside the file, such as the mode of its folder, so do not
        # store the file state: the next call tries again.
        except KeyFileError as error:
            if str(error) != self._last_error:
                _LOGGER.error(
                    "%s; the clients from the last successful read stay authorised",
                    error,
                )
            self._last_error, self.is_current = str(error), False


def _unique_id(grant: Grant) -> tuple[str, bool]:
    """Return the part of a grant that must be unique in the file.

    A name has at most one key and one invitation; using the invitation replaces the
    key.
    """
    return grant.name, grant.is_invitation
