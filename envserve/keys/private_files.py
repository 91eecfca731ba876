"""Files that only their user can read, and that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from envserve.errors import KeyFileError

__all__ = ["display_path", "locked", "make_folder", "read_private", "write_private"]


def display_path(path: Path) -> str:
    """Returns a path as people write it, with ~ for their home."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def read_private(path: Path, remedy: str = "") -> str | None:
    """Returns the text of a file, or None if there is none.

    Args:
      path: A file in a folder, both of this user's own and closed to others.
      remedy: What to do besides of chmod if others can read it.

    Raises:
      KeyFileError: Others can read it or own it, or it cannot be read.
    """
    with _as_key_file_error(path, "read"):
        try:
            _check(path.parent, os.stat(path.parent), "chmod 700")
            # Not blocked by a pipe, and not led elsewhere by a link.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(fd, encoding="utf-8", errors="replace") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(f"{display_path(path)} is no file; take it away")
            _check(path, found, f"chmod 600{remedy}")
            return file.read()


@contextlib.contextmanager
def _as_key_file_error(path: Path, participle: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "expected a file or folder of this user's own, and no link"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            remedy = "expected room to write; make some, or name another ENVSERVE_HOME"
        raise KeyFileError(
            f"{display_path(path)} cannot be {participle}: {error.strerror}; {remedy}"
        ) from None


def _check(path: Path, found: os.stat_result, remedy: str) -> None:
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"{display_path(path)} belongs to another user (uid {found.st_uid}); "
            f"expected uid {os.geteuid()}; take it away, or name another folder by "
            f"ENVSERVE_HOME"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        verb = "read" if mode & 0o055 else "written"
        raise KeyFileError(
            f"{display_path(path)} can be {verb} by others (mode {mode:04o}); {remedy}"
        )


def make_folder(folder: Path) -> None:
    """Makes a folder for keys if there is none; raises KeyFileError."""
    with _as_key_file_error(folder, "made"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(folder, os.stat(folder), "chmod 700")


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 1.0) -> Iterator[None]:
    """Makes a folder, and keeps others from changing its files meanwhile.

    Raises:
      KeyFileError: Another process did so for so many seconds, or it cannot be made.
    """
    make_folder(folder)
    give_up_at = time.monotonic() + seconds
    with _as_key_file_error(folder, "read"):
        fd = os.open(folder, os.O_RDONLY)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > give_up_at:
                raise KeyFileError(
                    f"{display_path(folder)} is being changed by another process for "
                    f"more than {seconds:g} s; end that one"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Replaces a file; raises KeyFileError, and then it is what it was."""
    import tempfile  # which a probe does not need

    with _as_key_file_error(path, "written"), contextlib.ExitStack() as cleaning:
        fd, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # 0600
        cleaning.callback(lambda: Path(part).unlink(missing_ok=True))
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(part, path)
