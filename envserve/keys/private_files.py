"""Read files that only their owner can access, and replace them atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from envserve.errors import KeyFileError, raise_if_from_handler
from envserve.regular_file import flush_to_disk, open_regular

#: Maximum size of a private file; enough for 100,000 clients, one per line.
_MAX_BYTES: Final = 1 << 26
#: Maximum time to wait for a folder that another process has locked.
_LOCK_SECONDS: Final = 1.0


def display_path(path: Path) -> str:
    """Return a path for messages, with ~ for the home folder."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def read_private(path: Path, remedy: str = "") -> str | None:
    """Return the text of a private file, or None if it does not exist.

    Args:
      path: The file. The file and its folder must belong to this user, and other users
        must not have access to them.
      remedy: Advice to append to the error, after the chmod command, if other users can
        read the file.

    Raises:
      KeyFileError: Other users own the file or folder or have access to it, or the
        file cannot be read.
    """
    with _as_key_file_error(path, "read"):
        try:
            _check_folder(path.parent)
            file = open_regular(path, _MAX_BYTES, follow_links=False)
        except FileNotFoundError:
            return None
        with io.TextIOWrapper(file, "utf-8-sig", "replace") as text:
            stat_result = os.fstat(text.fileno())
            _check_owner_and_mode(path, stat_result, f"chmod 600{remedy}")
            return text.read()


@contextlib.contextmanager
def _as_key_file_error(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise_if_from_handler(error)
        remedy = "expected a file or folder that belongs to this user, and not a link"
        if error.errno in (errno.EACCES, errno.ENOENT):
            remedy = "check its owner, or set ENVSERVE_HOME to a folder of this user"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            remedy = "free disk space, or set ENVSERVE_HOME to another folder"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit on open files (ulimit -n)"
        elif error.errno in (errno.ENOLCK, errno.ENOTSUP):
            remedy = "set ENVSERVE_HOME to a folder whose file system supports locks"
        raise KeyFileError(
            f"{display_path(path)} cannot be {verb}: {error.strerror}; {remedy}"
        ) from None


def _check_folder(folder: Path) -> None:
    stat_result = os.stat(folder)
    if not stat.S_ISDIR(stat_result.st_mode):
        raise KeyFileError(
            f"{display_path(folder)} is not a folder; set ENVSERVE_HOME to a folder"
        )
    _check_owner_and_mode(folder, stat_result, "chmod 700")


def _check_owner_and_mode(path: Path, stat_result: os.stat_result, remedy: str) -> None:
    if stat_result.st_uid != os.geteuid():
        raise KeyFileError(
            f"{display_path(path)} belongs to another user (uid {stat_result.st_uid}); "
            f"expected uid {os.geteuid()}; remove it, or set ENVSERVE_HOME to another "
            f"folder"
        )
    if stat_result.st_mode & 0o077:
        mode = stat.S_IMODE(stat_result.st_mode)
        verb = "read" if mode & 0o055 else "written"
        raise KeyFileError(
            f"{display_path(path)} can be {verb} by others (mode {mode:04o}); {remedy}"
        )


def make_folder(folder: Path) -> None:
    """Create a private folder if it does not exist.

    Raises:
      KeyFileError: The folder cannot be created.
    """
    with _as_key_file_error(folder, "created"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder if necessary, and lock it against changes by other processes.

    Raises:
      KeyFileError: The folder stayed locked, or cannot be created.
    """
    make_folder(folder)
    give_up_at = time.monotonic() + _LOCK_SECONDS
    with _as_key_file_error(folder, "read"):
        fd = os.open(folder, os.O_RDONLY)
    try:
        while True:
            with (
                _as_key_file_error(folder, "locked"),
                contextlib.suppress(BlockingIOError),
            ):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > give_up_at:
                raise KeyFileError(
                    f"{display_path(folder)} has been locked by another process for "
                    f"more than {_LOCK_SECONDS:g} s; end that process"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Write text to a private file, replacing the old file atomically.

    Raises:
      KeyFileError: The file cannot be written; the old file is kept.
    """
    import tempfile  # imported here because health probes do not need it

    with _as_key_file_error(path, "written"), contextlib.ExitStack() as cleaning:
        # `mkstemp` creates the file with mode 0600.
        fd, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        cleaning.callback(lambda: Path(part).unlink(missing_ok=True))
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(part, path)
        flush_to_disk(path.parent)
