"""Terminal input and output of `envserve` and `ppo`: errors, colours, key presses."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TextIO

from envserve.cli.logs import JsonLines
from envserve.errors import (
    AddressError,
    EnvStartError,
    KeyFileError,
    ReproError,
    SpaceError,
    UnknownEnv,
    VideoError,
    WrapperError,
)
from envserve.text import exception_line, printable

if TYPE_CHECKING:
    from rich.console import Console


#: Errors that report a mistake in the input of a command.
_INPUT_ERRORS = (
    *(AddressError, EnvStartError, KeyFileError, ReproError, SpaceError, UnknownEnv),
    *(VideoError, WrapperError),
)


def error_code(error: Exception) -> int:
    """Return the exit code for an error: 2 for wrong input, 1 for a failure."""
    return 2 if isinstance(error, _INPUT_ERRORS) else 1


def fail(error: Exception | str, code: int | None = None) -> NoReturn:
    """Print an error and exit; "Exit codes" in the docs lists the codes.

    Args:
      error: Exception or text.
      code: The exit code; by default, the one that `error_code` returns.
    """
    show_error(error)
    if code is None:
        code = 1 if isinstance(error, str) else error_code(error)
    raise SystemExit(code)


def show_error(error: Exception | str) -> None:
    """Print an error as one line on stderr, followed by the notes of the exception.

    If the logs are in JSON, the error is logged instead.

    Args:
      error: Exception or text. If an exception contains a traceback from a worker, only
        the exception, the source location and the worker's hints are printed, because
        the log contains the whole traceback.
    """
    text = str(error)
    if traceback := str(getattr(error, "remote_traceback", "")).strip():
        text, last = text.splitlines()[0], exception_line(traceback)
        text = text if last in text else f"{text}: {last}"
        frames = re.findall(r'^  File "([^<].*)", line (\d+)', traceback, re.MULTILINE)
        users = [frame for frame in frames if "/lib/python" not in frame[0]]
        text += "".join(f" ({file}:{line})" for file, line in (users or frames)[-1:])
    hints = re.findall(r"^Hint: .*", traceback, re.MULTILINE)
    notes = [*hints, *getattr(error, "__notes__", [])]
    if any(isinstance(h.formatter, JsonLines) for h in logging.root.handlers):
        logging.getLogger("envserve").error("\n".join((text, *notes)))
        return
    if sys.stderr is not None:
        styled_text = styled(f"Error: {printable(text)}", 31, sys.stderr)
        write(sys.stderr, "\n".join((styled_text, *map(printable, notes), "")))


def prepare_streams() -> None:
    """Make the standard streams usable, even if they are closed or not UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process has closed the stream
            null = os.open(os.devnull, os.O_RDWR)
            # Descriptors 0 to 2 must be inheritable, because child processes use them
            # as standard streams.
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            # Replace characters that cannot be encoded or decoded. This is impossible
            # if the caller of `Program.main` has already read from stdin.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")


def write(stream: TextIO, text: str = "") -> bool:
    """Write text to a stream and flush it.

    If an error occurs, the stream discards all later output.

    Returns:
      Whether the text was written.
    """
    try:
        if text:
            stream.write(text)
        stream.flush()
    except OSError as error:
        # Discard the buffered output: otherwise, the interpreter would fail to flush it
        # on exit, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        # A closed pipe is not an error: `head`, for example, reads only part of the
        # output.
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            show_error(f"cannot write to stdout: {error.strerror}")
        return False
    return True


def console() -> Console:
    """Return a console for stdout that prints tables and colours."""
    from rich.console import Console

    return Console(highlight=False)


def styled(text: str, code: int, stream: TextIO) -> str:
    """Return text in an ANSI style if the stream is a terminal, unless NO_COLOR is set.

    Args:
      text: Text to print.
      code: ANSI code of the style, such as 31 for red.
      stream: Stream that the text will be written to.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not stream.isatty() else f"\033[{code}m{text}\033[0m"


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for key presses, and returns the typed characters.

    Its argument is the maximum number of seconds to wait. If stdin is not a terminal,
    or this process runs in its background, the function waits for the whole time and
    returns an empty string. Within the context, SIGTERM raises KeyboardInterrupt, so
    that the terminal is restored.
    """
    import termios
    import tty

    # Changing the settings of a terminal would stop a process in its background.
    has_keyboard = sys.stdin.isatty() and not _is_in_background(sys.stdin)
    keyboards = [sys.stdin] if has_keyboard else []

    def wait(seconds: float) -> str:
        ready, _, _ = select.select(keyboards, [], [], seconds)
        return os.read(ready[0].fileno(), 64).decode(errors="replace") if ready else ""

    saved = [termios.tcgetattr(stream) for stream in keyboards]
    old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for stream in keyboards:
            tty.setcbreak(stream)
        yield wait
    finally:
        for stream, settings in zip(keyboards, saved, strict=True):
            termios.tcsetattr(stream, termios.TCSADRAIN, settings)
        signal.signal(signal.SIGTERM, old_handler)


def _is_in_background(terminal: TextIO) -> bool:
    """Return whether a shell has started this process in the background, with `&`."""
    try:
        return os.tcgetpgrp(terminal.fileno()) != os.getpgrp()
    except OSError:  # this terminal does not control the process
        return False
