"""Values of settings that are tables, as a file gives them back."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

__all__ = ["Table", "Tables"]


def _plain(value: Any) -> Any:
    """Return a value as the folder of a run will give it back: with lists, no tuples.

    Raises:
        PydanticCustomError: it holds what JSON has no word for.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PydanticCustomError("plain", "expected names, numbers, text, truth or lists")


Table = Annotated[
    Mapping[str, Any], AfterValidator(_plain), Field(examples=['{"name": 1}'])
]
Tables = Annotated[
    tuple[Annotated[Mapping[str, Any], AfterValidator(_plain)], ...],
    Field(strict=False, examples=['[{name = "ActionRepeat", amount = 4}]']),
]
