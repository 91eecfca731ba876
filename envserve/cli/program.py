"""The command-line framework of `envserve` and `ppo`: it turns functions into commands.

Positional parameters of a function become arguments, and keyword-only parameters become
options; a parameter annotated with `Fields` becomes one option per field of a
dataclass. The help text comes from the docstring of the function, whose `Args` section
describes the parameters, and from the docstrings of the fields.

The value of an option comes from the first of these sources that has one: the command
line, the environment variable of the option, the file of `--config`, the default in the
signature. `settings.convert_field` converts values from all sources in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
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

from envserve.cli.completion import (
    completion_code,
    install_completion,
    line_to_complete,
)
from envserve.cli.terminal import (
    error_code,
    fail,
    prepare_streams,
    show_error,
    write,
)
from envserve.errors import EnvserveError
from envserve.text import nearest_name

Command = Callable[..., Any]

_MAX_WIDTH: Final = 100
#: Maps the type of a value to its placeholder in the help. All floats on the command
#: line are durations in seconds.
_METAVARS: Final = {int: "INT", float: "SECONDS", Path: "PATH", dict: "JSON"}
_HELP: Final = ("-h", "--help")


@dataclass(frozen=True)
class Option:
    """An argument or option of a command.

    In a parameter's annotation, an `Option` overrides the values that are derived from
    the signature and the docstring; annotations may set only the attributes from `help`
    to `values`.

    Attributes:
      help: Help text if the docstring has none; the help omits a parameter without
        help text.
      flag: Long option; by default, `--` and the name. Empty for an argument.
      metavar: Placeholder of the value; by default its type, or the argument's name.
      panel: Heading under which the help lists the option.
      variable: Environment variable that sets the option.
      values: Function that returns possible values, for shell completion.
      name: Name of the parameter, or of the field.
      group: Name of the `Fields` parameter that the option belongs to, if any.
      hint: Annotated type of the value, with its bounds, without None.
      kind: Type without bounds and item types, such as int or list.
      default: Default value; `inspect.Parameter.empty` if a value is required.
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

    @property
    def is_negated(self) -> bool:
        """Whether the flag, such as --no-preload, turns a default off."""
        return self.kind is bool and self.default is True

    @property
    def shown_default(self) -> str:
        """The default, for the help; "" for flags, or if the help text describes it."""
        default = self.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        is_described = "by default" in self.help.lower()
        if (
            self.kind is bool
            or is_described
            or not isinstance(default, str | int | float)
        ):
            return ""
        return str(default).lower() if isinstance(default, bool) else str(default)

    def add_to(self, panel: argparse._ArgumentGroup) -> None:
        """Add the option to an argument group of a parser.

        The parser gets no default, so it returns the option only if the command line
        contains it.
        """
        text = self.help
        if self.shown_default:
            text += f" [default: {self.shown_default}]"
        elif self.is_required and self.flag:
            text += " [required]"
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": self.metavar}
        kwargs["help"] = text.replace("%", "%%") if text else argparse.SUPPRESS
        if not self.flag:
            many, one = ("+", None) if self.is_required else ("*", "?")
            panel.add_argument(self.name, nargs=many if self.is_list else one, **kwargs)
            return
        if self.kind is bool:
            del kwargs["metavar"]
            kwargs["action"] = "store_true"
        elif self.is_list:
            kwargs["action"] = "append"
        kwargs |= {"dest": self.name, "required": self.is_required}
        panel.add_argument(self.flag, **kwargs)

    def convert(self, value: Any) -> Any:
        """Convert a value to the option's type.

        Raises:
          ValueError: The value is invalid.
        """
        from envserve.settings import convert_field

        if self.kind is dict and isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        name = self.flag or self.name.upper()
        converted = convert_field(name, value, self.hint, is_strict=False)
        return not converted if self.is_negated else converted


@dataclass(frozen=True)
class Fields:
    """Turns a parameter into one option per field of a dataclass.

    With `limits: Annotated[dict[str, Any], Fields(Limits)]`, the command receives a
    dictionary of the given fields, converted to their types. The command constructs the
    dataclass itself, so that `__post_init__` can validate the fields together.

    Attributes:
      kind: The dataclass; the docstring of each field is the help of its option.
      describe: Function that returns an `Option` for a field name; the attributes of
        the option override the values that are derived from the field.
    """

    kind: Any
    describe: Callable[[str], Option] = lambda field: Option()


class GivenOptions(NamedTuple):
    """The options that are set by the command line, the environment or a file.

    A parameter of a command with this type receives these options.

    Attributes:
      values: Maps names of parameters to converted values, without defaults.
      sources: Each option that is set, with its unconverted value.
    """

    values: Mapping[str, Any]
    sources: Sequence[tuple[Option, Any]]

    def words(self, *excluded: str) -> list[str]:
        """Return the options as a command line, without excluded parameters."""
        words = []
        for option, value in self.sources:
            for item in value if isinstance(value, list) else [value]:
                if option.name not in excluded and item is not False:
                    words += [option.flag] if option.flag else []
                    words += [str(item)] if item is not True else []
        return words


def parse(command: Command, words: Sequence[str], name: str) -> dict[str, Any]:
    """Return the keyword arguments for a command from its command line.

    If the command line is invalid, print an error and exit; for --help, print the help
    and exit.

    Args:
      command: Function to call.
      words: Words after the name of the command.
      name: Name of the command, as users type it.
    """
    options = [*options_of(command)]
    parser = _parser(command, name, options)
    option_words = [*takewhile(lambda word: word != "--", words)]
    if not {*_HELP}.isdisjoint(option_words):
        print(parser.format_help(), end="")
        raise SystemExit(0)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    sources = []
    for each, value, source in _given_options(parser, words, option_words, options):
        try:
            converted = values[each.group][each.name] = each.convert(value)
        except ValueError as error:
            parser.error(source + str(error).removeprefix(source and f"{each.flag}: "))
        if each.kind is bool:
            value = converted is not each.is_negated
        sources.append((each, value))
    for key, hint in get_type_hints(command, include_extras=True).items():
        if hint is GivenOptions:
            values[""][key] = GivenOptions({**values[""]}, sources)
        elif isinstance(_annotation_of(hint), Fields):
            values[""][key] = values[key]
    return values[""]


def environment() -> dict[str, str]:
    """Return the environment without the variables of Kubernetes services.

    If a service is named envserve or envserve-metrics, Kubernetes sets variables such
    as ENVSERVE_PORT or ENVSERVE_METRICS_PORT in all pods.
    """
    variables = dict(os.environ)
    # A cluster may have thousands of variables of services with other names.
    for key in [key for key in os.environ if key.startswith("ENVSERVE")]:
        service = key.removesuffix("_SERVICE_HOST")
        if service != key:
            forms = rf"{re.escape(service)}_(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)"
            for name in filter(re.compile(forms).fullmatch, os.environ):
                # The user may have set ENVSERVE_METRICS_PORT to a number.
                if name != f"{service}_PORT" or "://" in os.environ[name]:
                    variables.pop(name, None)
    return variables


def options_of(command: Command) -> Iterator[Option]:
    """Yield the arguments and options of a command."""
    docs = _docs_of(command)[1]
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        match _annotation_of(hints[name]):
            case Fields(kind, describe):
                yield from _options_of_fields(kind, describe, name)
            case annotation if hints[name] is not GivenOptions:
                option = _option(name, hints[name], parameter.default, annotation, docs)
                is_option = parameter.kind is parameter.KEYWORD_ONLY
                metavar = annotation.metavar or name.rstrip("_").upper()
                yield option if is_option else replace(option, flag="", metavar=metavar)


def _options_of_fields(
    kind: Any, describe: Callable[[str], Option], group: str
) -> Iterator[Option]:
    from envserve.settings import field_docs

    docs, hints = field_docs(kind), get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        annotation = replace(describe(field.name), group=group)
        yield _option(field.name, hints[field.name], default, annotation, docs)


def _option(
    name: str, hint: Any, default: Any, annotation: Option, docs: Mapping[str, str]
) -> Option:
    if get_origin(_without_annotations(hint)) in (Union, UnionType):
        hint = get_args(_without_annotations(hint))[0]  # X of `X | None`
    plain_hint = _without_annotations(hint)
    kind = get_origin(plain_hint) or plain_hint
    metavar = "|".join(get_args(plain_hint)) if kind is Literal else _METAVARS.get(kind)
    return replace(
        annotation,
        help=docs.get(name, annotation.help),
        flag=annotation.flag or f"--{name.rstrip('_').replace('_', '-')}",
        metavar=annotation.metavar or metavar or "TEXT",
        name=name,
        hint=plain_hint if kind is Literal else hint,
        kind=kind,
        default=default,
    )


def _without_annotations(hint: Any) -> Any:
    """Return X for `Annotated[X, ...]`, and any other type unchanged."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def _annotation_of(hint: Any) -> Any:
    """Return the `Option` or `Fields` in the annotation of a parameter."""
    annotations = getattr(hint, "__metadata__", ())
    return next((a for a in annotations if isinstance(a, Option | Fields)), Option())


def _docs_of(command: Command) -> tuple[str, dict[str, str]]:
    """Return a function's docstring up to `Args:`, and the text of each parameter."""
    text, _, section = (inspect.getdoc(command) or "").partition("\nArgs:\n")
    entries = re.findall(r"^(\w+): (.+(?:\n +.+)*)", textwrap.dedent(section), re.M)
    return text, {name: " ".join(doc.split()) for name, doc in entries}


class _Formatter(argparse.HelpFormatter):
    """Wraps help text at spaces only, so that names of options are not split."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=30, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (self._split_lines(part, width) for part in text.split("\n\n"))
        return "\n\n".join(map("\n".join, paragraphs))


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors as one line."""

    def __init__(self, name: str, usage: str, text: str) -> None:
        formatter = _Formatter(name)
        usage = formatter._fill_text(f"usage: {name} {usage}", formatter._width, "")
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
    """Return a parser that returns only the options that the command line contains."""
    usage = "[OPTIONS]"
    panels: dict[str, list[Option]] = {"Arguments": []}
    for each in options:
        panels.setdefault(each.panel if each.flag else "Arguments", []).append(each)
        if each.help and not each.flag:
            text = each.metavar if each.is_required else f"[{each.metavar}]"
            usage += f" {text}"
            usage += "..." * (each.is_list and " " not in each.metavar)
    last = panels.pop("Options", [])
    parser = _Parser(name, usage, _docs_of(command)[0])
    for title, rows in {**panels, "Options": last}.items():
        group = parser.add_argument_group(title)
        for each in rows:
            each.add_to(group)
    group.add_argument(*_HELP, action="help", help="Show this help and exit.")
    return parser


def _given_options(
    parser: _Parser,
    words: Sequence[str],
    option_words: Iterable[str],
    options: Iterable[Option],
) -> Iterator[tuple[Option, Any, str]]:
    """Yield the options that are set by the command line, the environment or a file.

    Each item consists of the option, its value before conversion, and a prefix that
    names the source in errors about the value ("" for the command line).

    Args:
      parser: Parser of the command.
      words: The command line.
      option_words: The words before `--`, which may be options.
      options: Options of the command.
    """
    flags = {option.flag: option for option in options if option.flag}
    for word in option_words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in flags:
            hint = _hint_for_setting(flag, value, options) or _hint(flag, flags)
            parser.error(f"there is no option {flag}{hint}")
        if equals and flag in flags and flags[flag].kind is bool:
            parser.error(f"{flag}: expected no value; got {value!r}")
    parsed = vars(parser.parse_intermixed_args(words))
    has_file = "--config" in flags and "config" in parsed
    file = _read_file(parser, parsed["config"], flags) if has_file else {}
    variables = environment()
    # The argument ENV overrides a variable or file that sets the option --env.
    given = {f"--{o.name}" for o in options if not o.flag and parsed.get(o.name)}
    for option in options:
        if option.name in parsed:
            yield option, parsed[option.name], ""
        elif option.flag in given:
            continue
        elif text := variables.get(option.variable):
            source = f"environment variable {option.variable}: "
            yield option, text.split() if option.is_list else text, source
        elif option.flag in file:
            value = file[option.flag]
            is_single = option.is_list and not isinstance(value, list)
            source = f"--config {parsed['config']}: {option.flag.removeprefix('--')}: "
            yield option, [value] if is_single else value, source


def _read_file(parser: _Parser, path: str, flags: Iterable[str]) -> dict[str, Any]:
    """Return a dict from flags to values, from a TOML file of options."""
    try:
        values = tomllib.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--config {path}: expected a TOML file; {error}")
    names = [flag.removeprefix("--") for flag in flags if flag != "--config"]
    for key in values.keys() - {*names}:
        expected = "expected long option names as keys"
        parser.error(f"--config {path}: {expected}; got {key!r}{_hint(key, names)}")
    return {f"--{key}": value for key, value in values.items()}


def _hint_for_setting(flag: str, value: str, options: Iterable[Option]) -> str:
    """Return a hint to pass an unknown flag as a KEY=VALUE of an option; "" if none."""
    name = flag.removeprefix("--").replace("-", "_")
    for option in options:
        if option.metavar == "KEY=VALUE":
            for key in {f"{name}=", f"{name}_seconds="}.intersection(option.values()):
                return f"; did you mean {option.flag} {key}{value or 'VALUE'}?"
    return ""


#: Maps names of options and commands in other programs to their names here.
_OTHER_NAMES: Final = {
    "no-browser": "no-open",
    "browser": "open",
    "host": "bind",
    "port": "bind",
    "address": "bind",
    "serve": "start",
    "stop": "drain",
    "list": "envs",
    "run": "train",
}


def _hint(word: str, known: Iterable[str]) -> str:
    # Without the prefix, --workers and --num-workers are similar.
    prefix = "--" if word.startswith("--") else ""
    names = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    word = word.removeprefix(prefix)
    other = _OTHER_NAMES.get(word)
    nearest = other if other in names else nearest_name(word, names)
    return f"; did you mean {prefix}{nearest}?" if nearest else ""


def _version(name: str) -> str:
    from importlib.metadata import version

    from envserve.python_process import build_commit

    commit = f" (commit {commit_id})" if (commit_id := build_commit()) else ""
    return f"{name} {version('envserve')}{commit}"


_INSTALL: Final = (
    "Install completion for the shell in $SHELL (bash, zsh, fish), and exit."
)
_SHOW: Final = "Print the code that --install-completion installs, and exit."
#: Maps each option of a program to its help, and to a function that takes the name of
#: the program and returns the text to print.
_PROGRAM_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], str]]]] = {
    "--version": ("Print the version and exit.", _version),
    "--install-completion": (_INSTALL, install_completion),
    "--show-completion": (_SHOW, completion_code),
}


@dataclass(frozen=True)
class Program:
    """A program with commands.

    Attributes:
      name: Name of the program, as users type it.
      help: Sentence that describes the program.
      package: Package with one module per command, named like the first word of the
        command. The module has a function named like the last word, and is imported
        only when the command runs or its help is printed.
      panels: Maps headings of the help to command names of one or two words.
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
        """Run a command line, by default `sys.argv`, and exit with its code."""
        prepare_streams()
        code: Any = 1
        try:
            code = self._run(sys.argv[1:] if words is None else words)
        except SystemExit as ending:
            code = ending.code
        except EnvserveError as error:
            show_error(error)
            code = error_code(error)
        except (EOFError, KeyboardInterrupt):
            write(sys.stderr, "\n")
            code = 130
        except OSError as error:
            if write(sys.stdout, "\n") and not isinstance(error, BrokenPipeError):
                raise  # stdout works, so another file caused the error
        is_written = write(sys.stdout)
        write(sys.stderr)
        sys.exit(code or int(not is_written))

    def _run(self, words: Sequence[str]) -> Any:
        if (line := line_to_complete(self.name)) is not None:
            # The arguments of bash are the program, the text to replace, and the
            # previous word.
            print(*self._completions(line, *words[1:2]), sep="\n")
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
        """Return a parser that prints the help of all commands.

        If `first` is not empty, the help lists only the commands with this first word.
        """
        name = f"{self.name} {first}".rstrip()
        parser = _Parser(name, "COMMAND ...", "" if first else self.help)
        for title, names in self.panels.items():
            group = parser.add_argument_group(title)
            for command in names:
                if first in ("", command.split()[0]):
                    text = _docs_of(self.command(command))[0].split("\n\n")[0]
                    group.add_argument(command, help=" ".join(text.split()))
        group = parser.add_argument_group("Options")
        for flag, (text, _) in {} if first else _PROGRAM_OPTIONS.items():
            group.add_argument(flag, action="store_true", help=text)
        group.add_argument(*_HELP, action="help", help="Show this help and exit.")
        return parser

    def _completions(self, line: str, replaced: str | None = None) -> list[str]:
        """Return the possible completions of a line's last word.

        Args:
          line: Command line up to the cursor.
          replaced: End of the last word that the shell replaces; by default, the whole
            word. Bash replaces only the part after a colon.
        """
        *words, last = re.split(" +", line)[1:] or [""]
        found = {*_PROGRAM_OPTIONS} if not words else set()
        for name in self.names:
            parts = name.split()
            if len(words) < len(parts) and parts[: len(words)] == words:
                found.add(parts[len(words)])
            elif words[: len(parts)] == parts:
                options = [*options_of(self.command(name))]
                previous = [
                    o for o in options if o.flag == words[-1] and o.kind is not bool
                ]
                for item in previous or options:
                    values = (
                        get_args(item.hint) if item.kind is Literal else item.values()
                    )
                    found.update([item.flag] if item.flag and not previous else values)
        start = len(last.removesuffix(last if replaced is None else replaced))
        matches = (w for w in found if w.startswith(last) and (last or w[0] != "-"))
        return sorted(match[start:] for match in matches)
