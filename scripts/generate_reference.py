"""Write docs/settings.md: options of batches, servers and training runs, from the code.

Run this script after changing an option or its docstring; the test suite checks that
the page is up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from envserve import BatchEnv
from envserve.cli.program import Option, options_of
from envserve.cli.start import start
from envserve.settings import EnvOptions, LocalOptions, field_docs
from ppo.config import Config
from ppo.config.config import PPO_SETTINGS
from ppo.config.sac import SACSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

_INTRODUCTION = """\
# Options and settings

This page lists the options of batches, of `envserve start` and of training runs.
`scripts/generate_reference.py` writes it from the code.

## Options of batches

`BatchEnv.local`, `BatchEnv.connect` and `make_vec` accept these options as keyword
arguments, in addition to [their other arguments](api.md). The defaults are those of
`BatchEnv`. As in Gymnasium, `make_vec` seeds envs only if `seed` is given, returns all
infos, and passes actions and non-finite values by default; it has `autoreset_mode`
instead of `autoreset`. The options of local batches do not apply to servers, which have
their own."""
_START = """
## Options of `envserve start`

Options can also come from
[the environment or a file](command-line.md#options-of-a-server)."""
_PPO = """
## Settings of `ppo`

Set them in a config, or with `ppo train --set`; see
[the ppo command](ppo-command.md). The column "algorithm" states which algorithm
uses a setting; your own algorithm can use the settings of `ppo`, too."""

#: Maps titles of pages to file names.
_PAGES = {
    path.read_text("utf-8").partition("\n")[0].removeprefix("# "): path.name
    for path in PAGE.parent.glob("*.md")
}


def page() -> str:
    """Return the text of the page, in which names of other pages are links."""
    text = "\n".join(_lines()) + "\n"
    return re.sub(r'"([^"]+)" in the docs', lambda m: f"[{m[1]}]({_PAGES[m[1]]})", text)


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    yield from _table("option", "type", "accepted by", "meaning")
    docs = _docs_of_batch_options()
    for name, hint in get_type_hints(LocalOptions).items():
        where = "all" if name in EnvOptions.__annotations__ else "local batches"
        yield _row(f"`{name}`", _type(hint), where, docs[name])
    yield _START
    yield from _table("option", "value", "meaning")
    for option in options_of(start):
        name = option.flag or option.metavar
        value = "none" if option.kind is bool else f"`{option.metavar}`"
        yield _row(f"`{name}`", value, _meaning(option))
    yield _PPO
    yield from _table("setting", "algorithm", "type", "meaning")
    yield from _settings_of(
        Config, lambda name: "`ppo`" if name in PPO_SETTINGS else "all"
    )
    yield from _settings_of(SACSettings, lambda name: "`sac`")


def _docs_of_batch_options() -> dict[str, str]:
    """Return a dict from the keyword arguments of `BatchEnv.local` to their docs."""
    doc = inspect.getdoc(BatchEnv.local) or ""
    section = doc.partition("\nKeyword Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w+): (.+(?:\n    .+)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _settings_of(kind: type[Any], algorithm: Callable[[str], str]) -> Iterator[str]:
    docs, hints = field_docs(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, default = field.name, field.default
        if isinstance(default, tuple):  # as for `--set`
            default = ",".join(map(str, default))
        meaning = _meaning(Option(docs[name], default=default))
        yield _row(f"`{name}`", algorithm(name), _type(hints[name]), meaning)


def _table(*columns: str) -> Iterator[str]:
    yield ""
    yield _row(*columns)
    yield "|---" * len(columns) + "|"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _meaning(option: Option) -> str:
    """Return the help of an option, with its default."""
    default = option.shown_default
    return option.help + (f" Default: `{default}`." if default else "")


def _type(hint: Any) -> str:
    """Return a description of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType) or (args and type(None) in args):
        return " or ".join(map(_type, args))
    if origin is None:
        return "None" if hint is type(None) else f"`{hint.__name__}`"
    if issubclass(origin, Mapping):
        return "table"
    if origin is Callable:
        return "function"
    return f"list of {_type(args[0])}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
