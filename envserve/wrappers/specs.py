"""Which wrappers an env gets: names with arguments, checked before anything is built.

A spec is plain data. Written in a config it is a table with a `name`, like
`{name = "ActionRepeat", amount = 4}`; on a wire it is the pair [name, arguments].
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from envserve.errors import WrapperError
from envserve.wrappers.table import KNOWN, find

__all__ = [
    "MAX_WRAPPERS",
    "WrapperSpec",
    "Wrappers",
    "check_wrappers",
    "converted_arguments",
    "parse_wrappers",
    "plain_wrappers",
    "wrappers_from_plain",
]

#: Of one env.
MAX_WRAPPERS: Final = 16
_FORM: Final = 'a list of tables such as [{name = "ActionRepeat", amount = 4}]'


class WrapperSpec(msgspec.Struct, frozen=True, array_like=True):
    """One wrapper.

    Attributes:
      name: Its name in the table of those that are known.
      arguments: Plain values by name, in alphabetical order, so that equal wrappers
        are equal bytes; those that are missing have the wrapper's defaults.
    """

    name: Annotated[str, msgspec.Meta(max_length=200)]
    arguments: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        in_order = dict(sorted(self.arguments.items()))
        msgspec.structs.force_setattr(self, "arguments", in_order)

    def __str__(self) -> str:
        """Returns a form for messages, like `ActionRepeat(amount=4)`."""
        shown = [f"{key[:64]}={_shown(value)}" for key, value in self.arguments.items()]
        return f"{self.name[:64]}({', '.join(shown)})"


#: Those of one env, the innermost first.
Wrappers = Annotated[tuple[WrapperSpec, ...], msgspec.Meta(max_length=MAX_WRAPPERS)]


def parse_wrappers(tables: Any) -> tuple[WrapperSpec, ...]:
    """Reads wrappers as they are written in configs and in Python.

    Names that are not known here are left to those who build: they may know more.

    Args:
      tables: Mappings, each with a `name` and the arguments; the first one is applied
        first, and so is the innermost.

    Raises:
      WrapperError: The form is wrong, or arguments of a known wrapper are.
    """
    if not isinstance(tables, Sequence) or isinstance(tables, (str, bytes)):
        raise WrapperError(f"wrappers: expected {_FORM}; got {_shown(tables)}")
    specs = []
    for position, table in enumerate(tables):
        name = table.get("name") if isinstance(table, Mapping) else None
        if not isinstance(name, str) or not all(isinstance(key, str) for key in table):
            raise WrapperError(
                f"wrappers[{position}]: expected a table with a name, such as "
                f'{{name = "ActionRepeat", amount = 4}}; got {_shown(table)}'
            )
        arguments = {key: value for key, value in table.items() if key != "name"}
        specs.append(WrapperSpec(name, arguments))
    check_wrappers(specs, may_be_unknown=True)
    return tuple(specs)


def check_wrappers(
    specs: Sequence[WrapperSpec], *, may_be_unknown: bool = False
) -> None:
    """Raises WrapperError for too many wrappers of an env, or wrong arguments.

    And for names that are not known here, unless they may be unknown.
    """
    if len(specs) > MAX_WRAPPERS:
        raise WrapperError(
            f"wrappers: expected at most {MAX_WRAPPERS} of them; got {len(specs)}"
        )
    for position, spec in enumerate(specs):
        if spec.name in KNOWN or not may_be_unknown:
            converted_arguments(spec, position)


def converted_arguments(spec: WrapperSpec, position: int) -> dict[str, Any]:
    """Returns the arguments as the wrapper takes them; raises WrapperError."""
    known = find(spec.name, f"wrappers[{position}]")
    where = f"wrappers[{position}] ({spec.name})"
    takes = ", ".join(known.arguments) or "none"
    converted = {}
    for name, value in spec.arguments.items():
        if name not in known.arguments:
            raise WrapperError(
                f"{where}: expected arguments among {takes}; got {name[:64]!r}"
            )
        argument = known.arguments[name]
        try:
            converted[name] = argument.convert(value)
        except ValueError:
            raise WrapperError(
                f"{where}: {name}: expected {argument.text}; got {_shown(value)}"
            ) from None
    for name, argument in known.arguments.items():
        if argument.required and name not in converted:
            raise WrapperError(
                f"{where}: {name}: expected {argument.text}; got nothing"
            )
    return converted


def plain_wrappers(specs: Iterable[WrapperSpec]) -> list[list[Any]]:
    """Returns the pairs that stand for wrappers in messages and files."""
    return [[spec.name, dict(spec.arguments)] for spec in specs]


def wrappers_from_plain(value: Any) -> tuple[WrapperSpec, ...]:
    """Reads such pairs; only their form is checked, for `check_wrappers` to go on.

    Raises:
      WrapperError: They are no list of [name, arguments], or too many.
    """
    try:
        return msgspec.convert(value, Wrappers)
    except (msgspec.ValidationError, AttributeError) as error:  # an array for a map
        raise WrapperError(
            f"wrappers: expected pairs of a name and arguments; {error}"
        ) from None


def _shown(value: Any) -> str:
    """Returns a short form of a value that anybody may have sent."""
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, dict)):
        return reprlib.repr(value)
    return type(value).__name__
