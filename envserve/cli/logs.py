"""Logs of both programs: their formats, and output that never blocks the program.

A write to a pipe without a reader, or to a terminal paused with Ctrl-S, blocks. Servers
and trainers must continue, so a thread writes their output, and output beyond a limit
is dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

from envserve.text import one_line, printable

_LOGGER: Final = logging.getLogger(__name__)
_TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
#: Maximum amount of output to buffer for a slow reader.
_MAX_UNWRITTEN_CHARS: Final = 1 << 20
#: Maximum time to write the remaining output when the program exits.
_LAST_SECONDS: Final = 1.0


class TextLines(logging.Formatter):
    r"""Formats a record as text that no client, server or env can forge.

    Control characters are escaped. A message is one line, with "\n" for a newline,
    unless the record's attribute `is_multiline` is True. Further lines are indented, so
    that they cannot be mistaken for another record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record as text, without its traceback."""
        if not getattr(record, "is_multiline", False):
            record.message = one_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, with its traceback."""
        return printable(super().format(record)).replace("\n", "\n  ")


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object with time, level, logger and message.

    The keys of `extra={"fields": {...}}` are added to the object, but replace none of
    its keys.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {}) | entry
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes records to `sys.stderr`, even if it is replaced after logging starts."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


def set_up_logs(level: str, log_format: str) -> None:
    """Log to stderr, as text or as one JSON object per line."""
    handler = StderrHandler()
    is_json = log_format == "json"
    handler.setFormatter(JsonLines() if is_json else TextLines(_TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _BackgroundStream:
    """A text stream whose data is written by a thread.

    The thread writes to the file descriptor. If it wrote to the original stream, it
    would hold the stream's lock while it blocks, and the interpreter needs this lock to
    exit.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._unwritten: list[str] = []
        self._num_chars = self._num_dropped = 0
        self._is_idle = True
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Queue text, or drop it if too much text is queued."""
        with self._changed:
            if self._num_chars + len(text) > _MAX_UNWRITTEN_CHARS:
                self._num_dropped += text.count("\n")
            else:
                self._unwritten.append(text)
                self._num_chars += len(text)
            self._is_idle = False
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing, because the thread writes all data as soon as possible."""

    def drain(self) -> None:
        """Wait until all data is written, but not longer than a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle, _LAST_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._unwritten and not self._num_dropped
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_idle)
                text, self._unwritten = "".join(self._unwritten), []
            self._write_all(text)
            with self._changed:
                self._num_chars -= len(text)
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                _LOGGER.error(
                    "%d log lines were dropped because nobody read the output",
                    num_dropped,
                )

    def _write_all(self, text: str) -> None:
        fd, data = self._stream.fileno(), text.encode(self._stream.encoding, "replace")
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another process has made the file non-blocking
                select.select([], [fd], [])
            except OSError:  # the reader has exited
                return


@contextlib.contextmanager
def nonblocking_output() -> Iterator[None]:
    """Replace stdout and stderr with streams that never block.

    Streams that are redirected to files are not replaced. When the context ends, the
    remaining output is written, for at most a second. The process must not fork inside
    the context.
    """
    with contextlib.ExitStack() as stack:
        for stream, redirect in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            if _can_block(stream):
                background = _BackgroundStream(stream)
                stack.enter_context(redirect(cast(TextIO, background)))
                stack.callback(background.drain)
        yield


def _can_block(stream: TextIO) -> bool:
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # the stream is closed, or has no descriptor
        return False
