"""The command line of `envserve` and `ppo`: functions become commands.

A command is a function. Its positional parameters are arguments, its keyword-only ones
are options, and a parameter that is annotated with `Fields` is one option per field of
a dataclass. The docstring of the function is its help, with the `Args` section for its
parameters; fields have docstrings of their own.

The value of an option comes from the command line, else from its environment variable,
else from the file of `--config`, else from the signature. `settings.convert_field`
converts it to the annotated type, whatever its source is.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import chain, takewhile
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from envserve.cli.completion import asked_line, completion_code, install_completion
from envserve.cli.terminal import fail, prepare_streams, write

Command = Callable[..., Any]

_MAX_WIDTH: Final = 100
#: Placeholders of values by their type. All floats on the command line are seconds.
_METAVARS: Final = {int: "INT", float: "SECONDS", Path: "PATH", dict: "JSON"}
_HELP: Final = ("-h", "--help")


@dataclass(frozen=True)
class Option:
    """An argument or option of a command; in an annotation, what is special about it.

    Attributes:
      help: Help, if the docstring has none; a parameter without help is hidden.
      flag: Long option, by default `--` and the name; empty for an argument.
      metavar: Placeholder of the value; by default its type, or the argument's name.
      panel: Heading below which the help lists the option.
      variable: Environment variable that sets the option.
      values: Function that returns possible values, for completion in shells.
      name: Name of the parameter, or of the field.
      group: Name of the `Fields` parameter that the option belongs to, if any.
      hint: Type of a given value, with bounds.
      kind: The same type without bounds and the types of items.
      default: Value if none is given; `inspect.Parameter.empty` if one is required.
    """

    help: str = ""
    flag: str = ""
    metavar: str = ""
    panel: str = "Options"
    variable: str = ""
    values: Callable[[], Iterable[str]] = tuple
    name: str = ""
    group: str = ""
    hint: Any = None
    kind: Any = None
    default: Any = None

    @property
    def is_list(self) -> bool:
        """Whether the option takes several values."""
        return self.kind in (list, tuple, frozenset)

    @property
    def is_required(self) -> bool:
        """Whether a value must be given."""
        return self.default is inspect.Parameter.empty

    def add_to(self, panel: argparse._ArgumentGroup) -> None:
        """Add the option to a panel of a parser, without its default."""
        text, default = self.help, self.default
        shown = " ".join(default) if isinstance(default, tuple) else default
        if isinstance(shown, str | int | float) and shown is not False and shown != "":
            text += f" [default: {shown}]"
        known: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": self.metavar}
        known["help"] = text.replace("%", "%%") if text else argparse.SUPPRESS
        if not self.flag:
            many, one = ("+", None) if self.is_required else ("*", "?")
            panel.add_argument(self.name, nargs=many if self.is_list else one, **known)
            return
        if self.kind is bool:
            del known["metavar"]
        known["action"] = {bool: "store_true"}.get(self.kind, "store")
        known["action"] = "append" if self.is_list else known["action"]
        known |= {"dest": self.name, "required": self.is_required}
        panel.add_argument(self.flag, **known)

    def convert(self, value: Any) -> Any:
        """Return a value as the option's type; raise ValueError if it is no such."""
        from envserve.settings import convert_field

        if self.kind is dict and isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        name = self.flag or self.name.upper()
        return convert_field(name, value, self.hint, is_strict=False)


@dataclass(frozen=True)
class Fields:
    """The options of a dictionary: `limits: Annotated[dict[str, Any], Fields(Limits)]`.

    The dictionary has the fields that are given, converted to their types. The command
    makes the dataclass of them, which may check one against the other.

    Attributes:
      kind: The dataclass; the docstring of each field is the help of its option.
      describe: Function that returns what is special about a field.
    """

    kind: Any
    describe: Callable[[str], Option] = lambda field: Option()


class Given(NamedTuple):
    """What was given, by whatever source: the type of a parameter of a command.

    Attributes:
      values: Converted values by the names of their parameters; no defaults.
      sources: The same options, with values as they were given.
    """

    values: Mapping[str, Any]
    sources: Sequence[tuple[Option, Any]]

    def words(self, *but: str) -> list[str]:
        """Return a command line with the same values, except for some parameters."""
        words = []
        for option, value in self.sources:
            for each in value if isinstance(value, list) else [value]:
                if option.name not in but and each is not False:
                    words += [option.flag] if option.flag else []
                    words += [str(each)] if each is not True else []
        return words


def parse(command: Command, words: Sequence[str], name: str) -> dict[str, Any]:
    """Return the arguments with which a command line calls a command.

    Prints the help, or an error, and exits if there is nothing to call.

    Args:
      command: Function to call.
      words: Words after the name of the command.
      name: Name of the command, as users type it.
    """
    options = [*options_of(command)]
    parser = _parser(command, name, options)
    ahead = [*takewhile(lambda word: word != "--", words)]
    if not {*_HELP}.isdisjoint(ahead):
        print(parser.format_help(), end="")
        raise SystemExit(0)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    given = []
    for each, value in _given(parser, words, ahead, options):
        try:
            converted = values[each.group][each.name] = each.convert(value)
        except ValueError as error:
            parser.error(str(error))
        given.append((each, converted if each.kind is bool else value))
    for key, hint in get_type_hints(command, include_extras=True).items():
        if hint is Given:
            values[""][key] = Given({**values[""]}, given)
        elif isinstance(_mark_of(hint), Fields):
            values[""][key] = values[key]
    return values[""]


def options_of(command: Command) -> Iterator[Option]:
    """Yield the arguments and options of a command."""
    docs = _docs_of(command)[1]
    hints = get_type_hints(command, include_extras=True)
    for name, each in inspect.signature(command).parameters.items():
        match _mark_of(hints[name]):
            case Fields(kind, describe):
                yield from _options_of_fields(kind, describe, name)
            case mark if hints[name] is not Given:
                option = _option(name, hints[name], each.default, mark, docs)
                is_option = each.kind is each.KEYWORD_ONLY
                metavar = mark.metavar or name.rstrip("_").upper()
                yield option if is_option else replace(option, flag="", metavar=metavar)


def _options_of_fields(
    kind: Any, describe: Callable[[str], Option], group: str
) -> Iterator[Option]:
    from envserve.settings import field_docs

    docs, hints = field_docs(kind), get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        mark = replace(describe(each.name), group=group)
        yield _option(each.name, hints[each.name], default, mark, docs)


def _option(
    name: str, hint: Any, default: Any, mark: Option, docs: Mapping[str, str]
) -> Option:
    if get_origin(_bare(hint)) in (Union, UnionType):
        hint = get_args(_bare(hint))[0]  # the other one is None
    bare = _bare(hint)
    kind = get_origin(bare) or bare
    metavar = "|".join(get_args(bare)) if kind is Literal else _METAVARS.get(kind)
    return replace(
        mark,
        help=docs.get(name, mark.help),
        flag=mark.flag or f"--{name.rstrip('_').replace('_', '-')}",
        metavar=mark.metavar or metavar or "TEXT",
        name=name,
        hint=bare if kind is Literal else hint,
        kind=kind,
        default=default,
    )


def _bare(hint: Any) -> Any:
    """Return a type without the annotations around it."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def _mark_of(hint: Any) -> Any:
    """Return what the annotation of a parameter says of it."""
    marks = getattr(hint, "__metadata__", ())
    return next((m for m in marks if isinstance(m, Option | Fields)), Option())


def _docs_of(command: Command) -> tuple[str, dict[str, str]]:
    """Return the docstring of a function above `Args:`, and that of each parameter."""
    text, _, rest = (inspect.getdoc(command) or "").partition("\nArgs:\n")
    entries = re.findall(r"^(\w+): (.+(?:\n +.+)*)", textwrap.dedent(rest), re.M)
    return text, {name: " ".join(doc.split()) for name, doc in entries}


class _Formatter(argparse.HelpFormatter):
    """Wraps help between words only, so that names of options stay whole."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=30, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (self._split_lines(each, width) for each in text.split("\n\n"))
        return "\n\n".join(map("\n".join, paragraphs))


class _Parser(argparse.ArgumentParser):
    """Splits a command line; an error is one line."""

    def __init__(self, name: str, usage: str, text: str) -> None:
        look = _Formatter(name)
        usage = look._fill_text(f"usage: {name} {usage}", look._width, "")
        super().__init__(
            name,
            usage.removeprefix("usage: "),
            text,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        see = " See" if message.endswith("?") else "; see"
        fail(f"{message}{see} {self.prog} --help", 2)


def _parser(command: Command, name: str, options: Iterable[Option]) -> _Parser:
    """Return a parser whose namespace has only what a command line says."""
    usage = "[OPTIONS]"
    panels: dict[str, list[Option]] = {"Arguments": []}
    for each in options:
        panels.setdefault(each.panel if each.flag else "Arguments", []).append(each)
        if each.help and not each.flag:
            shown = each.metavar if each.is_required else f"[{each.metavar}]"
            usage += f" {shown}{'...' * each.is_list}"
    last = panels.pop("Options", [])
    parser = _Parser(name, usage, _docs_of(command)[0])
    for title, rows in {**panels, "Options": last}.items():
        group = parser.add_argument_group(title)
        for each in rows:
            each.add_to(group)
    group.add_argument(*_HELP, action="help", help="Show this help and exit.")
    return parser


def _given(
    parser: _Parser,
    words: Sequence[str],
    ahead: Iterable[str],
    options: Iterable[Option],
) -> Iterator[tuple[Option, Any]]:
    """Yield the options that are given, with their values before conversion.

    Of the words, those ahead of `--` may be options.
    """
    flags = {each.flag: each for each in options if each.flag}
    for word in ahead:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in flags:
            parser.error(f"there is no option {flag}{_hint(flag, flags)}")
        if equals and flag in flags and flags[flag].kind is bool:
            parser.error(f"{flag}: expected no value; got {value!r}")
    said = vars(parser.parse_intermixed_args(words))
    is_file = "--config" in flags and "config" in said
    file = _read_file(parser, said["config"], flags) if is_file else {}
    for each in options:
        if each.name in said:
            yield each, said[each.name]
        elif text := os.environ.get(each.variable):
            yield each, text.split() if each.is_list else text
        elif each.flag in file:
            value = file[each.flag]
            is_single = each.is_list and not isinstance(value, list)
            yield each, [value] if is_single else value


def _read_file(parser: _Parser, path: str, flags: Iterable[str]) -> dict[str, Any]:
    """Return the values in a file of options, by flag."""
    try:
        found = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: expected a TOML file; {error}")
    names = [flag.removeprefix("--") for flag in flags if flag != "--config"]
    for key in found.keys() - {*names}:
        expected = "expected the long names of options as keys"
        parser.error(f"--config {path}: {expected}; got {key!r}{_hint(key, names)}")
    return {f"--{key}": value for key, value in found.items()}


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _version(name: str) -> str:
    from importlib.metadata import version

    return f"{name} {version('envserve')}"


_INSTALL: Final = "Install completion for the shell in $SHELL (bash, zsh, fish); exit."
_SHOW: Final = "Print the code that --install-completion installs; exit."
#: Options of a program: their help, and what returns the answer.
_PROGRAM_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], str]]]] = {
    "--version": ("Print the version and exit.", _version),
    "--install-completion": (_INSTALL, install_completion),
    "--show-completion": (_SHOW, completion_code),
}


@dataclass(frozen=True)
class Program:
    """A program with commands.

    Attributes:
      name: Name, as users type it.
      help: What the program is for.
      package: Package that has a module per command, named after the first word of the
        command, with a function named after the last. It is imported only if the
        command is run or described.
      panels: Names of commands, of one or two words, by heading of the help.
    """

    name: str
    help: str
    package: str
    panels: Mapping[str, Sequence[str]]

    @property
    def names(self) -> list[str]:
        """The names of all commands."""
        return [*chain(*self.panels.values())]

    def command(self, name: str) -> Command:
        """Return the function of a command."""
        words = name.split()
        module = importlib.import_module(f"{self.package}.{words[0]}")
        command: Command = getattr(module, words[-1])
        return command

    def main(self, words: Sequence[str] | None = None) -> NoReturn:
        """Run a command line; end the process with its exit code."""
        prepare_streams()
        code: Any = 1
        try:
            code = self._run(sys.argv[1:] if words is None else words)
        except SystemExit as ending:
            code = ending.code
        except (EOFError, KeyboardInterrupt):
            write(sys.stderr, "\n")
            code = 130
        except OSError as error:
            if write(sys.stdout, "\n") and not isinstance(error, BrokenPipeError):
                raise  # stdout is not what failed
        is_whole = write(sys.stdout)
        write(sys.stderr)
        sys.exit(code or int(not is_whole))

    def _run(self, words: Sequence[str]) -> Any:
        if (line := asked_line(self.name)) is not None:
            print(*self._completions(line), sep="\n")
            return 0
        first = words[0] if words else ""
        if first in _PROGRAM_OPTIONS:
            print(_PROGRAM_OPTIONS[first][1](self.name))
            return 0
        length = 1 + any(name.startswith(f"{first} ") for name in self.names)
        name = " ".join(words[:length])
        if name in self.names:
            command = self.command(name)
            return command(**parse(command, words[length:], f"{self.name} {name}"))
        parser = self._overview(first if length == 2 else "")
        if len(words) < length:
            write(sys.stdout, parser.format_help())
            return 2
        if words[length - 1] not in _HELP:
            hint = _hint(name, [*self.names, *_PROGRAM_OPTIONS])
            parser.error(f"there is no command {name}{hint}")
        print(parser.format_help(), end="")
        return 0

    def _overview(self, first: str) -> _Parser:
        """Return a parser for the help of all commands, or of those with one word."""
        name = f"{self.name} {first}".rstrip()
        parser = _Parser(name, "COMMAND ...", "" if first else self.help)
        for title, names in self.panels.items():
            group = parser.add_argument_group(title)
            for each in names:
                if first in ("", each.split()[0]):
                    text = _docs_of(self.command(each))[0].split("\n\n")[0]
                    group.add_argument(each, help=" ".join(text.split()))
        group = parser.add_argument_group("Options")
        for flag, (text, _) in {} if first else _PROGRAM_OPTIONS.items():
            group.add_argument(flag, action="store_true", help=text)
        group.add_argument(*_HELP, action="help", help="Show this help and exit.")
        return parser

    def _completions(self, line: str) -> list[str]:
        """Return the words that may stand in place of the last one of a line."""
        *words, last = re.split(" +", line)[1:]
        found = {*_PROGRAM_OPTIONS} if not words else set()
        for name in self.names:
            parts = name.split()
            if len(words) < len(parts) and parts[: len(words)] == words:
                found.add(parts[len(words)])
            elif words[: len(parts)] == parts:
                options = [*options_of(self.command(name))]
                takes = [
                    o for o in options if o.flag == words[-1] and o.kind is not bool
                ]
                for each in takes or options:
                    values = (
                        get_args(each.hint) if each.kind is Literal else each.values()
                    )
                    found.update([each.flag] if each.flag and not takes else values)
        return sorted(w for w in found if w.startswith(last) and (last or w[0] != "-"))
