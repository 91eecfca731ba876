"""What `envserve` and `ppo` say on a terminal, said alike by both.

Help is plain text that fits any width and never cuts a name; an error is one line that
says what was expected, what came, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import re
import select
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TextIO

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ConfigFile", "LogFormat", "LogLevel", "console", "fail", "make_app"]
__all__ += ["keyboard", "set_up_logs", "show_error", "styled"]

_MAX_WIDTH: Final = 100
_MAX_NAME_WIDTH: Final = 32
_TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
#: How errors of a command line begin, and what they are in our words.
_PHRASES: Final = (
    (r"^Invalid value for '?(.*?)'?: ", r"\1: "),
    (r"Value error, .* is not one of (.*?)\.?$", r"expected one of \1"),
    (r"Input should be greater than or equal to ", "expected at least "),
    (r"Input should be ([^,]*).*", r"expected \1"),
    (r"^Missing (\w+) '?(.*?)'?\.?$", r"expected the \1 \2, got none"),
    (r"^No such option: (\S+).*", r"there is no option \1"),
    (r"^No such command '(.*?)'\.?", r"there is no command \1."),
    (r"^Option '(.*)' requires an argument\.?", r"\1: expected a value, got none"),
    (r"^Option '(.*)' does not take a value\.?", r"\1: expected no value, got one"),
    (r"^Got unexpected extra .* \((.*)\)", r"expected no more arguments, got \1"),
)


def fail(error: Exception | str, code: int) -> NoReturn:
    """Ends a command with what is wrong; docs/exit-codes.md lists the codes."""
    show_error(error)
    raise typer.Exit(code)


def show_error(error: Exception | str) -> None:
    """Writes a line to stderr, and the notes of an error below it.

    Args:
      error: What was expected, what came, and what to do. Of a traceback from a worker
        only the last line is shown: the log has all of it.
    """
    text = str(error)
    if traceback := str(getattr(error, "remote_traceback", "")).strip():
        text = f"{text.splitlines()[0]}: {traceback.splitlines()[-1]}"
    notes = getattr(error, "__notes__", [])
    if any(isinstance(h.formatter, _JsonLines) for h in logging.root.handlers):
        logging.getLogger("envserve").error("\n".join((text, *notes)))
        return
    if sys.stderr is not None:
        shown = styled(f"Error: {text}", 31, sys.stderr)
        _write(sys.stderr, "\n".join((shown, *notes, "")))


def console() -> Console:
    """Returns what prints tables and colours, as far as a terminal takes them."""
    from rich.console import Console

    return Console(highlight=False)


def styled(text: str, code: int, stream: TextIO) -> str:
    """Puts text in a colour, or in bold, on a terminal whose user has no objection."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not stream.isatty() else f"\033[{code}m{text}\033[0m"


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits for so long, or for keys; returns those pressed."""
    import termios
    import tty

    keyboards = [sys.stdin] if sys.stdin.isatty() else []

    def wait(seconds: float) -> str:
        ready, _, _ = select.select(keyboards, [], [], seconds)
        return os.read(ready[0].fileno(), 64).decode(errors="replace") if ready else ""

    before = [termios.tcgetattr(each) for each in keyboards]
    try:
        for each in keyboards:
            tty.setcbreak(each)
        yield wait
    finally:
        for each, settings in zip(keyboards, before, strict=True):
            termios.tcsetattr(each, termios.TCSADRAIN, settings)


class _Help:
    """Help in panels, for commands and groups of them."""

    def get_help(self, ctx: Any) -> str:
        """Returns the help, as wide as the terminal is."""
        formatter = ctx.make_formatter()
        formatter.width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        command: Any = self
        command.format_help(ctx, formatter)
        return str(formatter.getvalue()).rstrip("\n")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns what follows the command's name; what is required has no braces."""
        command: Any = self
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        unseen = [param for param in command.params if getattr(param, "hidden", False)]
        hidden = {piece for param in unseen for piece in param.get_usage_pieces(ctx)}
        return [re.sub("[{}]", "", piece) for piece in pieces if piece not in hidden]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a panel for each `rich_help_panel`, commands first."""
        command: Any = self
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, child in getattr(command, "commands", {}).items():
            if not child.hidden:
                text = " ".join((child.help or "").split("\n\n")[0].split())
                panel = child.rich_help_panel or "Commands"
                panels.setdefault(panel, []).append((name, text))
        for param in command.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or kind
                name = re.sub(r"<list\[(.*)\]>|<(.*) range>", r"<\1\2>", record[0])
                if kind == "Arguments":
                    name = param.display_name_raw
                panels.setdefault(panel, []).append((name, record[1]))
        # What all commands have comes last, in columns of its own.
        last = panels.pop("Options")
        first = panels.pop("Arguments", [])
        rest = [row for rows in panels.values() for row in rows]
        for title, rows in {"Arguments": first, **panels, "Options": last}.items():
            aligned = last if rows is last else rest + first
            longest = max((len(name) for name, _ in aligned), default=0)
            lines = _rows(rows, longest, formatter.width)
            shown = [f"\n{styled(f'{title}:', 1, sys.stdout)}", *lines, ""]
            formatter.write("\n".join(shown) if rows else "")


def _rows(rows: Sequence[tuple[str, str]], longest: int, width: int) -> list[str]:
    """Lays names and their help out in two columns, or one below the other."""
    column = min(longest, _MAX_NAME_WIDTH) + 4
    column = 6 if 2 * column > width else column
    lines = []
    for name, text in rows:
        helps = textwrap.wrap(text, max(width - column, 20))
        shown = "  " + styled(name, 36, sys.stdout)
        if len(name) + 4 <= column and helps:
            shown += " " * (column - 2 - len(name)) + helps.pop(0)
        lines += [shown, *(" " * column + line for line in helps)]
    return lines


class _Command(_Help, TyperCommand):
    """One command, whose arguments are in capitals, as what is to be put there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for param in self.params:
            if isinstance(param, TyperArgument):
                param.metavar = param.metavar or param.name.upper()


class _Group(_Help, TyperGroup):
    """A program, or a command that has others."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command line; ends the process with its exit code."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # whoever started us has closed it
                nowhere = os.open(os.devnull, os.O_WRONLY)
                setattr(sys, name, os.fdopen(nowhere, "w", closefd=False))
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # no locale is worth a traceback
                stream.reconfigure(errors="replace")
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except typer.TyperException as error:
            code = _refuse(error)
        except typer.Abort:
            code = 130
        except OSError as error:  # of stdout, if that takes no more
            if _write(sys.stdout, "\n") and not isinstance(error, BrokenPipeError):
                raise
            code = 1
        is_whole = _write(sys.stdout)
        _write(sys.stderr)
        sys.exit(code or int(not is_whole))


def _write(stream: TextIO, text: str = "") -> bool:
    """Tells whether a stream takes all that it was given; else it gets no more."""
    try:
        if text:
            stream.write(text)
        stream.flush()
    except OSError as error:
        # Else the interpreter tries again at its end, and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        # Whoever was reading has gone, as `head` does: that is no error.
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            show_error(f"stdout cannot be written: {error.strerror}; make room there")
        return False
    return True


def _refuse(error: typer.TyperException) -> int:
    """Says what is wrong with a command line; returns the exit code."""
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        _write(sys.stdout, f"{text}\n")
        return error.exit_code
    for pattern, words in _PHRASES:
        text = re.sub(pattern, words, text)
    if near := getattr(error, "possibilities", None):
        text += f"; did you mean {' or '.join(near)}?"
    for found in getattr(error.__cause__, "errors", list)()[:1]:
        text += f", got {found['input']!r}"
    if context := getattr(error, "ctx", None):
        text = f"{text.rstrip('.')}; see {context.command_path} --help"
    show_error(text)
    return error.exit_code


class _App(typer.Typer):
    """Registers commands whose help is ours."""

    def command(self, *args: Any, **options: Any) -> Any:
        return super().command(*args, **{"cls": _Command} | options)


def _show_version(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked:
        import importlib.metadata

        print(f"{ctx.info_name} {importlib.metadata.version('envserve')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """What a program can be told before a command."""


def make_app(name: str, help: str, *, is_program: bool = True) -> typer.Typer:
    """Returns an app to register commands with.

    A program has a version and completion in shells, a command that has others not.
    """
    return _App(
        name=name,
        help=help,
        cls=_Group,
        callback=_options if is_program else None,
        no_args_is_help=True,
        add_completion=is_program,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Has a file give what neither the command line nor the environment says."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(f"--config {path}: expected a TOML file; {error}", 2)
    options = {
        word.removeprefix("--"): param
        for param in ctx.command.params
        for word in param.opts
        if word.startswith("--") and word != "--config"
    }
    for key in given.keys() - options.keys():
        near = difflib.get_close_matches(key, options, 1, 0.0)
        expected = "expected the long names of options as keys"
        fail(f"--config {path}: {expected}, got {key!r}; did you mean {near[0]}?", 2)
    ctx.default_map = {}
    for key, value in given.items():
        if getattr(options[key], "multiple", False) and not isinstance(value, list):
            value = [value]
        ctx.default_map[str(options[key].name)] = value
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        callback=_read_config,
        is_eager=True,
        help="Options by their long names, as in: workers = 4. The command line wins "
        "over the environment (ENVSERVE_WORKERS=4, lists with spaces), which wins over "
        "the file.",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(
        envvar="ENVSERVE_LOG_LEVEL",
        show_envvar=False,
        help="What goes to stderr.",
        rich_help_panel="Logs",
    ),
]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        envvar="ENVSERVE_LOG_FORMAT",
        show_envvar=False,
        help="json: one object a line, with time, level, logger, message and fields.",
        rich_help_panel="Logs",
    ),
]


class _JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what there is more.

    A record's `fields`, as in `extra={"fields": {...}}`, become keys of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logs(level: str, log_format: str) -> None:
    """Has this process log to stderr, in lines of text or of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(_JsonLines() if is_json else logging.Formatter(_TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
