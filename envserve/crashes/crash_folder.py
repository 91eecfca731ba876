"""A folder of limited size for repro files.

Files are private to the user and written atomically. To make room for new files, the
oldest file of the owner that uses the most space is deleted, so that one client's
crashes do not displace another client's files. If a file cannot be written, the error
is logged and otherwise ignored.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

from envserve.errors import raise_if_from_handler

_LOGGER: Final = logging.getLogger(__name__)

SUFFIX: Final = ".repro"
#: Suffix of a file that is being written. It contains ".repro", because a file that
#: ends only with ".part" could belong to another program.
_PART: Final = f"{SUFFIX}.part"
_MAX_FILES: Final = 50
_MAX_BYTES: Final = 64 << 20
#: Minimum time between two writes, because thousands of envs may crash simultaneously.
_INTERVAL_SECONDS: Final = 1.0


def default_folder() -> Path:
    """Return the default folder for this user's repro files."""
    return Path(tempfile.gettempdir(), f"envserve-crashes-{os.getuid()}")


class CrashFolder:
    """Writes repro files to a folder, and limits their number, total size and rate."""

    def __init__(self, folder: Path | None, owner: str = "") -> None:
        """Set the folder, without creating it.

        Args:
          folder: The folder, which is created when it is first needed. None:
            `default_folder`, which must belong to this user and be inaccessible to
            others.
          owner: Owner of the envs; a digest of it is part of the file names.
        """
        self._owner = hashlib.sha256(owner.encode()).hexdigest()[:8]
        self._folder = folder
        self._next_write_at = -math.inf
        self._has_warned = False

    def check(self) -> None:
        """Create the folder if necessary, and check that it is writable.

        Raises:
          OSError: The folder cannot be created, or is not writable.
        """
        folder = self._ensure_folder()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")

    def may_write(self, now: float) -> bool:
        """Return whether the rate limit allows another file; `now` is monotonic."""
        return now >= self._next_write_at

    def write(self, name: str, data: bytes, now: float) -> Path | None:
        """Write a file.

        Args:
          name: Description of the env; the file name begins with it.
          data: Content of the file.
          now: Current monotonic time in seconds.

        Returns:
          The path, or None if the file could not be written. Only the first of
          consecutive failures is logged.
        """
        self._next_write_at = now + _INTERVAL_SECONDS
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:80].strip("-.")
        try:
            folder = self._ensure_folder()
            path = _write_whole(folder, f"{stem}-{self._owner}", data)
            _prune(folder, path)
        except OSError as error:
            raise_if_from_handler(error)
            if not self._has_warned:
                _LOGGER.warning(
                    "cannot write repro files: %s; set crash_dir to a writable folder",
                    error,
                )
            self._has_warned = True
            return None
        self._has_warned = False
        return path

    def _ensure_folder(self) -> Path:
        # The constructor does not determine the default folder, because `gettempdir`
        # raises an error if no folder is writable.
        folder = self._folder or default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder:
            return folder
        # Another user may have created the folder, because all users can write to its
        # parent.
        stat_result = os.lstat(folder)
        if (
            not stat.S_ISDIR(stat_result.st_mode)
            or stat_result.st_uid != os.getuid()
            or stat_result.st_mode & 0o077
        ):
            text = f"{folder} is not a folder that only this user can access"
            raise PermissionError(errno.EACCES, text)
        return folder

    def __repr__(self) -> str:
        return f"<CrashFolder {self._folder or 'in the default folder'}>"


def _prune(folder: Path, newest: Path) -> None:
    """Delete files until the folder is within its limits; `newest` was written last.

    Other processes may delete files at the same time.
    """
    # Maps digests of owners to the modification time, size and path of each file.
    files: dict[str, list[tuple[float, int, Path]]] = {}
    num_files = num_bytes = 0
    for path in folder.iterdir():
        if path.name.endswith((SUFFIX, _PART)):
            with contextlib.suppress(FileNotFoundError):
                stat_result = path.lstat()
                owner_files = files.setdefault(path.name.rpartition("-")[0][-8:], [])
                # Other files seem to be newer if the clock was set back.
                time = math.inf if path == newest else stat_result.st_mtime_ns
                owner_files.append((time, stat_result.st_size, path))
                num_files, num_bytes = num_files + 1, num_bytes + stat_result.st_size
    while num_files > _MAX_FILES or num_bytes > _MAX_BYTES:
        largest = max(files.values(), key=_used_fraction)
        _, size, path = oldest = min(largest)
        largest.remove(oldest)
        path.unlink(missing_ok=True)
        num_files, num_bytes = num_files - 1, num_bytes - size


def _used_fraction(files: list[tuple[float, int, Path]]) -> float:
    return sum(1 / _MAX_FILES + size / _MAX_BYTES for _, size, _ in files)


def _write_whole(folder: Path, stem: str, data: bytes) -> Path:
    # mkstemp creates a private file and does not follow symbolic links.
    fd, part = tempfile.mkstemp(_PART, f"{stem}-", folder)
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
