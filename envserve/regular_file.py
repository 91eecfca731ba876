"""Open files that others may have created, and flush files to disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(
    path: Path, max_bytes: int | None = None, *, follow_links: bool = True
) -> BufferedReader:
    """Open a file for reading, unless it is a named pipe or a device.

    Opening a pipe blocks until another process writes to it, and a device may be
    endless.

    Args:
      path: The file.
      max_bytes: Maximum size of the file; by default, any size.
      follow_links: Whether the file may be a symbolic link.

    Raises:
      OSError: The file cannot be opened, is not a regular file, or is too large.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    with contextlib.ExitStack() as on_error:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | links)
        on_error.callback(os.close, fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if max_bytes is not None and found.st_size > max_bytes:
            text = f"larger than {max_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, text, str(path))
        on_error.pop_all()
    return open(fd, "rb")


def open_no_link(path: str | Path, flags: int) -> int:
    """Open a file for writing, but reject symbolic links and FIFOs without a reader.

    Another user may have created the link or FIFO. The arguments and the result are
    those of the `opener` of `open`.

    Raises:
      OSError: The file cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to disk.

    A new or renamed file survives a power failure only if its folder has been flushed
    too.

    Raises:
      OSError: The data cannot be written.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot flush folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
