"""Reads the msgpack maps of control messages, field by field, trusting nothing.

Fields that are not asked for are ignored, so that newer peers may add some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from envserve import codec
from envserve.errors import RemoteProtocolError

__all__ = ["Fields", "clip"]

Choice = TypeVar("Choice", bound=str)


class Fields:
    """The fields of one body; every method raises RemoteProtocolError."""

    def __init__(self, value: Any, where: str) -> None:
        """Takes a decoded value that should be a map; `where` is for messages."""
        if not isinstance(value, dict):
            raise RemoteProtocolError(
                f"{where}: expected a map; got {type(value).__name__}"
            )
        self._values = value
        self._where = where

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, where: str) -> Fields:
        """Decodes a body whose length has been checked."""
        try:
            return cls(codec.decode(data, max_bytes=len(data)), where)
        except codec.CodecError as error:
            raise RemoteProtocolError(f"{where}: {error}") from None

    def integer(
        self, name: str, low: int, high: int, default: int | None = None
    ) -> int:
        """Returns an int in [low, high]."""
        value = self._values.get(name, default)
        if type(value) is not int or not low <= value <= high:
            self._fail(name, f"an int in [{low}, {high}]", value)
        return int(value)

    def number(self, name: str) -> float:
        """Returns a finite number that is not negative."""
        value = self._values.get(name)
        if not isinstance(value, (int, float)) or not 0 <= value < 2**63:
            self._fail(name, "a number that is not negative", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Returns a bool."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            self._fail(name, "a bool", value)
        return value

    def text(self, name: str, max_length: int, default: str | None = None) -> str:
        """Returns a str of at most so many characters."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or len(value) > max_length:
            self._fail(name, f"a str of at most {max_length} characters", value)
        return value

    def choice(self, name: str, choices: Sequence[Choice]) -> Choice:
        """Returns one of some words."""
        value = self._values.get(name)
        if isinstance(value, str):  # an array compared with a str is an array
            for known in choices:
                if value == known:
                    return known
        self._fail(name, f"one of {', '.join(choices)}", value)

    def items(self, name: str, max_length: int) -> list[Any]:
        """Returns a list of at most so many values, whatever they are."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) > max_length:
            self._fail(name, f"a list of at most {max_length} values", value)
        return value

    def integers(self, name: str, max_length: int, high: int) -> tuple[int, ...]:
        """Returns ints in [0, high]."""
        values = self.items(name, max_length)
        if not all(type(value) is int and 0 <= value <= high for value in values):
            self._fail(name, f"a list of ints in [0, {high}]", values)
        return tuple(values)

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns a map whose keys are str."""
        value = self._values.get(name)
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            self._fail(name, "a map with str keys", value)
        return value

    def anything(self, name: str) -> Any:
        """Returns whatever value the field has; None if there is none."""
        return self._values.get(name)

    def _fail(self, name: str, expected: str, value: Any) -> NoReturn:
        # Only scalars are shown: the repr of hostile nesting can be anything.
        shown = type(value).__name__
        if isinstance(value, (int, float, str)):
            shown = repr(value)[:80]
        raise RemoteProtocolError(
            f"{self._where}.{name}: expected {expected}; got {shown}"
        )


def clip(text: str, max_bytes: int, *, keep_end: bool = False) -> str:
    """Cuts a text to so many bytes of UTF-8; a traceback's end is what counts."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    part = data[-max_bytes:] if keep_end else data[:max_bytes]
    return part.decode(errors="ignore")
