"""A folder of repro files that cannot fill a disk, or stop anybody.

Files are private to the user and appear whole. They give way to new ones: the oldest of
whoever has the most, so that one client's crashes do not push out another's. Whatever
the file system refuses costs a line in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["SUFFIX", "CrashFolder", "default_folder"]

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


class CrashFolder:
    """Writes files to a folder, as long as that is cheap and allowed."""

    def __init__(self, folder: Path | None, owner: str = "") -> None:
        """Does nothing yet.

        Args:
          folder: Where to write to, made if need be; None for `default_folder`, which
            must be the user's own.
          owner: Whose envs crash; names of files hold a digest of it.
        """
        self._owner = hashlib.sha256(owner.encode()).hexdigest()[:8]
        self._folder = folder
        self._free_at = -float("inf")
        self._has_warned = False

    def check(self) -> None:
        """Makes the folder if need be; raises OSError if no file could be written."""
        folder = self._made_folder()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written to")

    def has_room(self, now: float) -> bool:
        """Tells whether the next file may be written, in monotonic seconds."""
        return now >= self._free_at

    def write(self, name: str, data: bytes, now: float) -> Path | None:
        """Writes a file; returns its path, or None if the file system refused.

        Its name begins with what it is about; the rest is made up.
        """
        self._free_at = now + _INTERVAL_SECONDS
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:80].strip("-.")
        try:
            folder = self._made_folder()
            path = _write_whole(folder, f"{stem}-{self._owner}", data)
            _prune(folder)
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

    def _made_folder(self) -> Path:
        # Sought only now: where nothing can be written, there is no default.
        folder = self._folder or default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder:
            return folder
        # Anybody may have made it before us, in a folder that all can write to.
        found = os.lstat(folder)
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or found.st_mode & 0o077
        ):
            raise PermissionError(
                f"{folder} is not a folder that only this user can use"
            )
        return folder

    def __repr__(self) -> str:
        return f"<CrashFolder {self._folder or 'in the default folder'}>"


def _prune(folder: Path) -> None:
    """Removes what is too much; another process may be doing the same."""
    files: dict[str, list[tuple[int, int, Path]]] = {}  # by digest of the owner
    num_files = num_bytes = 0
    for path in folder.iterdir():
        if path.name.endswith((SUFFIX, _PART)):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                of_owner = files.setdefault(path.name.rpartition("-")[0][-8:], [])
                of_owner.append((found.st_mtime_ns, found.st_size, path))
                num_files, num_bytes = num_files + 1, num_bytes + found.st_size
    while num_files > _MAX_FILES or num_bytes > _MAX_BYTES:
        most = max(files.values(), key=_part_of_limits)
        _, size, path = oldest = min(most)
        most.remove(oldest)
        path.unlink(missing_ok=True)
        num_files, num_bytes = num_files - 1, num_bytes - size


def _part_of_limits(files: list[tuple[int, int, Path]]) -> float:
    return sum(1 / _MAX_FILES + size / _MAX_BYTES for _, size, _ in files)


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
