"""A folder of repro files that cannot fill a disk, or stop anybody.

Files are private to the user, appear whole, and the oldest give way to new ones.
Whatever the file system refuses costs a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["SUFFIX", "CrashFiles", "default_folder"]

_LOGGER: Final = logging.getLogger(__name__)

SUFFIX: Final = ".repro"
#: Of a file that is being written; others' files may end with the last of it.
_PART: Final = f"{SUFFIX}.part"
_MAX_FILES: Final = 50
_MAX_BYTES: Final = 64 << 20
#: At most one file in this time: crashes may come by the thousand.
_INTERVAL_SECONDS: Final = 1.0


def default_folder() -> Path:
    """Returns where this user's files go if nothing else is said."""
    return Path(tempfile.gettempdir(), f"envserve-crashes-{os.getuid()}")


class CrashFiles:
    """Writes files to a folder, as long as that is cheap and allowed."""

    def __init__(self, folder: Path | None) -> None:
        """Does nothing yet.

        Args:
          folder: Where to write to, made if need be; None for `default_folder`, which
            must be the user's own.
        """
        self._folder = folder or default_folder()
        self._must_be_ours = folder is None
        self._free_at = -float("inf")
        self._has_warned = False

    def check(self) -> None:
        """Makes the folder if need be; raises OSError if no file could be written."""
        self._make_folder()
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{self._folder} cannot be written to")

    def has_room(self, now: float) -> bool:
        """Tells whether the next file may be written, in monotonic seconds."""
        return now >= self._free_at

    def write(self, name: str, data: bytes, now: float) -> Path | None:
        """Writes a file; returns its path, or None if the file system refused.

        Args:
          name: What it is about; the rest of the file's name is made up.
          data: Its content.
          now: Monotonic seconds.
        """
        self._free_at = now + _INTERVAL_SECONDS
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:80].strip("-.")
        try:
            self._make_folder()
            path = _write_whole(self._folder, stem, data)
            self._prune()
        except OSError as error:
            if not self._has_warned:
                _LOGGER.warning(
                    "no repro files of crashes, since %s; "
                    "set crash_dir to a folder that can be written to",
                    error,
                )
            self._has_warned = True
            return None
        self._has_warned = False
        return path

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._must_be_ours:
            return
        # Anybody may have made it before us, in a folder that all can write to.
        found = os.lstat(self._folder)
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or found.st_mode & 0o077
        ):
            raise PermissionError(
                f"{self._folder} is not a folder that only this user can use"
            )

    def _prune(self) -> None:
        """Removes the oldest files; another process may be doing the same."""
        files = []
        for path in self._folder.iterdir():
            if path.name.endswith((SUFFIX, _PART)):
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    files.append((found.st_mtime_ns, found.st_size, path))
        num_bytes = 0
        for number, (_, size, path) in enumerate(sorted(files, reverse=True), 1):
            num_bytes += size
            if number > _MAX_FILES or num_bytes > _MAX_BYTES:
                path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        """Returns the folder."""
        return f"<CrashFiles {self._folder}>"


def _write_whole(folder: Path, stem: str, data: bytes) -> Path:
    fd, part = tempfile.mkstemp(_PART, f"{stem}-", folder)  # private, and no link
    path = Path(part).with_suffix("")
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    return path
