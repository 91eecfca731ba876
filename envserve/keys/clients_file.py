"""The `clients` file: a server's authorised clients, reloaded when it changes.

If the file cannot be read, the clients from the last successful read stay authorised,
and the error is logged. The server and commands such as `envserve invite` edit single
lines and preserve comments.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from envserve.errors import CodecError, KeyFileError, RemoteProtocolError
from envserve.keys import private_files
from envserve.keys.grant import Grant, format_line, parse_line
from envserve.keys.private_files import display_path

_LOGGER: Final = logging.getLogger(__name__)

#: Time after which the file is read again if it could not be read, even if it has not
#: changed: the cause may be outside the file, such as the mode of a parent folder or a
#: lack of file descriptors.
_RETRY_SECONDS: Final = 1.0
_HEADER: Final = "# name       public key        limits: see envserve invite --help"


class _Contents(NamedTuple):
    """The lines with their grants, and the grants by raw key and by `_unique_id`."""

    lines: list[tuple[str, Grant | None]]
    by_key: dict[bytes, Grant]
    by_id: dict[tuple[str, bool], Grant]


class ClientsFile:
    """The authorised clients of a server, and the invitations to it.

    Attributes:
      refreshes_on_lookup: Whether lookups first call `refresh`. A server calls it in a
        thread instead, because it blocks while a network file system does not respond.
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
        # Replaced as a whole, because another thread may read the file meanwhile.
        self._contents = _Contents([], {}, {})
        self._file_state: tuple[object, ...] = ()
        self._retry_at = math.inf  # infinite unless the last read failed
        self._last_error = ""
        self._lock = threading.Lock()  # held while the file is read
        self.refreshes_on_lookup = True

    @property
    def is_current(self) -> bool:
        """Whether the last read of the file succeeded."""
        return self._retry_at == math.inf

    def find(self, public: bytes, now: float) -> Grant | None:
        """Return the grant of a raw public key; None if it is not valid at `now`.

        Times are Unix times in seconds.
        """
        if public == self._local_public:
            return Grant(name="local", public=public)
        grant = self._look_up().by_key.get(public)
        return grant if grant and grant.is_valid(now) else None

    def find_name(self, name: str, now: float) -> Grant | None:
        """Return the grant of a client; None if none is valid at `now`."""
        grant = self._look_up().by_id.get((name, False))
        return grant if grant and grant.is_valid(now) else None

    def grants(self, now: float = -math.inf) -> list[Grant]:
        """Return the grants that are valid at `now`; by default, all grants."""
        grants = self._look_up().by_key.values()
        return [grant for grant in grants if grant.is_valid(now)]

    def refresh(self) -> None:
        """Read the file if it has changed; log an error if it cannot be read."""
        if self._stat() == self._file_state and time.monotonic() < self._retry_at:
            return
        try:
            self.read()
        except KeyFileError as error:
            if str(error) != self._last_error:
                _LOGGER.error(
                    "%s; the clients from the last successful read stay authorised",
                    error,
                )
            self._last_error = str(error)

    def _look_up(self) -> _Contents:
        if self.refreshes_on_lookup:
            self.refresh()
        return self._contents

    def read(self) -> None:
        """Read the file.

        Raises:
          KeyFileError: The file cannot be read or is not valid; the grants do not
            change.
        """
        with self._lock:
            self._file_state = self._stat()
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._contents = self._parse(private_files.read_private(self._path))
            self._retry_at, self._last_error = math.inf, ""

    def _parse(self, text: str | None) -> _Contents:
        old_lines = self._contents.lines
        if text is None and old_lines:
            raise KeyFileError(f"{display_path(self._path)} no longer exists")
        if old_lines and not (text or "").endswith("\n"):
            raise KeyFileError(
                f"{display_path(self._path)} is empty, or its last line is incomplete; "
                "if another process is writing it, wait until it is done"
            )
        # Parsing is by far the slowest part, and most lines do not change, so the
        # grants of unchanged lines are reused.
        parsed = dict(old_lines)
        contents = lines, by_key, by_id = _Contents([], {}, {})
        for number, line in enumerate((text or "").splitlines(), 1):
            try:
                grant = parsed[line] if line in parsed else parse_line(line)
                if grant:
                    if grant.public in by_key or _unique_id(grant) in by_id:
                        raise CodecError("expected each name and each key only once")
                    by_key[grant.public] = by_id[_unique_id(grant)] = grant
            except CodecError as error:
                where = f"{display_path(self._path)}, line {number}"
                raise KeyFileError(f"{where}: {error}") from None
            lines.append((line, grant))
        return contents

    def add(self, grant: Grant, now: float) -> None:
        """Add a client or an invitation, replacing one of the same kind and name.

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
        """Remove a client's key and invitation; return whether there was one.

        Raises:
          KeyFileError: The file cannot be read or changed.
        """
        with private_files.locked(self._path.parent):
            self.read()
            if not any(grant.name == name for grant in self.grants()):
                return False
            self._rewrite(lambda old: old.name == name)
            return True

    def enrol(self, invitation: bytes, public: bytes, now: float) -> Grant | None:
        """Replace an invitation's key with the client's own public key.

        Args:
          invitation: Raw public key of the invitation.
          public: Raw public key of the client.
          now: Unix time in seconds.

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
            same = self.find(public, -math.inf)
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
        old_lines = self._contents.lines
        lines = [line for line, old in old_lines if old is None or not is_replaced(old)]
        lines = lines or [_HEADER]
        if new is not None:
            same = self._contents.by_key.get(new.public)
            if same is not None and not is_replaced(same):
                raise KeyFileError(
                    f"expected a different key for each client; {new.name} and "
                    f"{same.name} have the same key; create another client.key for one "
                    f"of them"
                )
            lines.append(format_line(new))
        private_files.write_private(self._path, "".join(f"{line}\n" for line in lines))
        self.read()

    def _stat(self) -> tuple[object, ...]:
        """Return a tuple that changes with the file's contents or permissions."""
        try:
            folder = os.stat(self._path.parent)
            file = os.stat(self._path, follow_symlinks=False)
        except OSError as error:
            return (error.errno,)
        times = file.st_mtime_ns, file.st_ctime_ns
        return file.st_ino, file.st_size, *times, folder.st_mode, folder.st_uid


def _unique_id(grant: Grant) -> tuple[str, bool]:
    """Return the part of a grant that must be unique in the file.

    A name has at most one key and one invitation; using the invitation replaces the
    key.
    """
    return grant.name, grant.is_invitation
