"""Kinds of arguments that wrappers take: plain values within bounds.

They may come from the other end of a wire, so each kind has bounds: what a wrapper may
cost its host is decided here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any

__all__ = ["Argument", "Boolean", "Choice", "Integer", "Integers", "Number"]


@dataclass(frozen=True)
class Argument(ABC):
    """A kind of value.

    Attributes:
      required: Whether the wrapper has no default for it.
    """

    _: KW_ONLY
    required: bool = False

    @abstractmethod
    def accepts(self, value: Any) -> bool:
        """Tells whether a value is of this kind and within its bounds."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns what is expected, for messages."""

    def convert(self, value: Any) -> Any:
        """Returns an accepted value as the wrapper's constructor takes it."""
        return value


@dataclass(frozen=True)
class Integer(Argument):
    """An int in [low, high]."""

    low: int
    high: int

    def accepts(self, value: Any) -> bool:
        """See `Argument`."""
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an int from {self.low} to {self.high}"


@dataclass(frozen=True)
class Number(Argument):
    """A finite int or float in [low, high]; wrappers get a float."""

    low: float
    high: float

    def accepts(self, value: Any) -> bool:
        """See `Argument`."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and self.low <= value <= self.high

    def convert(self, value: Any) -> float:
        """See `Argument`."""
        return float(value)

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Boolean(Argument):
    """True or false."""

    def accepts(self, value: Any) -> bool:
        """See `Argument`."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Choice(Argument):
    """One of some words."""

    words: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        """See `Argument`."""
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True)
class Integers(Argument):
    """A list of ints in [low, high]; wrappers get a tuple."""

    low: int
    high: int
    min_length: int
    max_length: int

    def accepts(self, value: Any) -> bool:
        """See `Argument`."""
        return (
            isinstance(value, (list, tuple))
            and self.min_length <= len(value) <= self.max_length
            and all(
                type(item) is int and self.low <= item <= self.high for item in value
            )
        )

    def convert(self, value: Any) -> tuple[int, ...]:
        """See `Argument`."""
        return tuple(value)

    def __str__(self) -> str:
        count = f"{self.min_length}"
        if self.max_length != self.min_length:
            count += f" to {self.max_length}"
        return f"a list of {count} ints from {self.low} to {self.high}"
