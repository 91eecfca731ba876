"""The wrappers in a request for an env: names and arguments, as plain data.

Wrappers are checked before the env is built. In a config, a wrapper is a table with a
`name`, such as `{name = "ActionRepeat", amount = 4}`; on the wire it is the pair [name,
arguments].
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from envserve.errors import WrapperError
from envserve.wrappers.registry import WRAPPERS, find_wrapper

#: Maximum number of wrappers per env.
MAX_WRAPPERS: Final = 16
_FORM: Final = """a list such as [{"name": "ActionRepeat", "amount": 4}]"""
_CALLABLE_HINT: Final = (
    "; only workers of this host accept classes and functions: for a server, register "
    "the wrapper with register_wrapper in a module that the server imports (--import)"
)


class WrapperSpec(msgspec.Struct, frozen=True, array_like=True):
    """The name and arguments of a wrapper.

    Attributes:
      name: Registered name of the wrapper.
      arguments: Maps argument names to plain values. The names are sorted, so that
        equal wrappers are encoded as equal bytes. Missing arguments have the wrapper's
        defaults.
    """

    name: Annotated[str, msgspec.Meta(max_length=200)]
    arguments: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        in_order = dict(sorted(self.arguments.items()))
        msgspec.structs.force_setattr(self, "arguments", in_order)

    def __str__(self) -> str:
        """Return a form for messages, such as `ActionRepeat(amount=4)`."""
        arguments = [
            f"{key[:64]}={_short_repr(value)}" for key, value in self.arguments.items()
        ]
        return f"{self.name[:64]}({', '.join(arguments)})"


#: A wrapper in Python code. Gymnasium's `WrapperSpec` is accepted too.
WrapperLike = str | Mapping[str, Any] | Callable[..., Any]
#: The wrappers of one env, the innermost first.
Wrappers = Annotated[tuple[WrapperSpec, ...], msgspec.Meta(max_length=MAX_WRAPPERS)]


def table_of(wrapper: Any) -> Any:
    """Convert a name or a registered class to a table; return other forms unchanged."""
    if isinstance(wrapper, str):
        return {"name": wrapper}
    name = getattr(wrapper, "__qualname__", "")
    make = getattr(WRAPPERS.get(name), "make", None)
    if isinstance(make, str):
        # The module of a class that exists has been imported. The name alone does not
        # identify the class: Gymnasium's wrappers of vector envs have the same names.
        module, _, attribute = make.partition(":")
        make = getattr(sys.modules.get(module), attribute, None)
    return {"name": name} if make is not None and make is wrapper else wrapper


def parse_wrappers(tables: Any) -> tuple[WrapperSpec, ...]:
    """Parse wrappers in the form that configs and Python code use.

    Names that are not registered in this process are accepted, because they may be
    registered where the envs are built.

    Args:
      tables: Mappings, each with a `name` and the arguments, or other forms that
        `table_of` converts; the innermost wrapper first.

    Raises:
      WrapperError: The form, or an argument of a registered wrapper, is invalid.
    """
    if not isinstance(tables, Sequence) or isinstance(tables, (str, bytes)):
        is_single = isinstance(tables, (str, Mapping)) or callable(tables)
        raise WrapperError(
            f"wrappers: expected {_FORM}; got {_short_repr(tables)}"
            + ("; put it into a list" if is_single else "")
        )
    specs = []
    for position, table in enumerate(map(table_of, tables)):
        name = table.get("name") if isinstance(table, Mapping) else None
        if not isinstance(name, str) or not all(isinstance(key, str) for key in table):
            raise WrapperError(
                f"wrappers[{position}]: expected a name, or a table such as "
                f'{{"name": "ActionRepeat", "amount": 4}}; got {_short_repr(table)}'
                + (_CALLABLE_HINT if callable(table) else "")
            )
        arguments = {key: value for key, value in table.items() if key != "name"}
        specs.append(WrapperSpec(name, arguments))
    check_wrappers(specs, allow_unknown=True)
    return tuple(specs)


def check_wrappers(
    specs: Sequence[WrapperSpec], *, allow_unknown: bool = False
) -> None:
    """Check the number of wrappers of one env, and their arguments.

    Raises:
      WrapperError: There are too many wrappers, an argument is wrong or, unless
        `allow_unknown`, a name is not registered.
    """
    if len(specs) > MAX_WRAPPERS:
        raise WrapperError(
            f"expected at most {MAX_WRAPPERS} wrappers; got {len(specs)}"
        )
    for position, spec in enumerate(specs):
        if spec.name in WRAPPERS or not allow_unknown:
            convert_arguments(spec, position)


def convert_arguments(spec: WrapperSpec, position: int) -> dict[str, Any]:
    """Return the arguments of a wrapper, converted to the types that it takes.

    Raises:
      WrapperError: The name is unknown, or an argument is wrong or missing.
    """
    registered = find_wrapper(spec.name, f"wrappers[{position}]")
    where = f"wrappers[{position}] ({spec.name})"
    accepted = ", ".join(registered.arguments) or "none"
    converted = {}
    for name, value in spec.arguments.items():
        if name not in registered.arguments:
            raise WrapperError(
                f"{where}: unknown argument {name[:64]!r}; expected {accepted}"
            )
        argument = registered.arguments[name]
        try:
            converted[name] = argument.convert(value)
        except ValueError:
            raise WrapperError(
                f"{where}: {name}: expected {argument.text}; got {_short_repr(value)}"
            ) from None
    for name, argument in registered.arguments.items():
        if argument.required and name not in converted:
            raise WrapperError(
                f"{where}: missing argument {name!r}; expected {argument.text}"
            )
    return converted


def wrappers_to_plain(specs: Iterable[WrapperSpec]) -> list[list[Any]]:
    """Return wrappers as pairs [name, arguments], for messages and files."""
    return [[spec.name, dict(spec.arguments)] for spec in specs]


def wrappers_from_plain(value: Any) -> tuple[WrapperSpec, ...]:
    """Parse pairs [name, arguments]; `check_wrappers` checks their content.

    Raises:
      WrapperError: The value has a different form, or there are too many wrappers.
    """
    try:
        return msgspec.convert(value, Wrappers)
    # msgspec raises AttributeError for an array where it expects a map.
    except (msgspec.ValidationError, AttributeError) as error:
        raise WrapperError(
            f"wrappers: expected pairs of a name and arguments; {error}"
        ) from None


def _short_repr(value: Any) -> str:
    """Return a short form of a value that an untrusted peer may have sent."""
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, dict)):
        return reprlib.repr(value)
    return str(getattr(value, "__name__", type(value).__name__))
