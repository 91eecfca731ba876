"""What a key may: a line of the file `clients`.

# name       public key                   what it may
trainer-1    envserve-public-1.Yne...     envs=ALE/*,CartPole-v1 max-envs=64
trainer-2    envserve-invite-1.fW_...     until=2026-11-22T10:15:00Z max-envs=64
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, get_type_hints

from msgspec import Meta

from envserve.errors import CodecError
from envserve.keys import formats
from envserve.settings import ExposeRule, KwargRule, check_ranges, convert

__all__ = ["Grant", "format_line", "format_time", "parse_line", "parse_words"]

_Count = Annotated[int, Meta(ge=1)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_Pattern = Annotated[str, Meta(min_length=1)]

#: Of users without a key of their own in `clients`.
_RESERVED: Final = ("local", "server")


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a client may; None stands for the host's own limit."""

    name: _Name
    public: bytes
    """Raw key: the client's, or that of its invitation."""
    envs: tuple[_Pattern, ...] = ("*",)
    """Patterns of env names."""
    max_envs: _Count | None = None
    max_processes: _Count | None = None
    max_leases: _Count | None = None
    max_row_mib: _Count | None = None
    exposed: tuple[ExposeRule, ...] | None = None
    allowed_kwargs: tuple[KwargRule, ...] | None = None
    share: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Weight of this client while others wait."""
    expires: float | None = None
    """Seconds since 1970 from which on the key is unknown."""
    until: float | None = None
    """Of an invitation: seconds since 1970 from which on it is unknown."""

    @property
    def is_invitation(self) -> bool:
        """Whether the key may do nothing but join."""
        return self.until is not None

    def holds(self, now: float) -> bool:
        """Tells whether the key is good, at seconds since 1970."""
        return all(end is None or now < end for end in (self.expires, self.until))

    def may_use(self, env_name: str) -> bool:
        """Tells whether an env's name fits to a pattern."""
        return any(fnmatchcase(env_name, pattern) for pattern in self.envs)


_HINTS: Final = get_type_hints(Grant, include_extras=True)
_SHORT: Final = {"exposed": "expose", "allowed_kwargs": "kwargs"}
#: The field that each option sets.
_FIELDS: Final = {
    _SHORT.get(f.name, f.name.replace("_", "-")): f for f in fields(Grant)[2:]
}


def parse_line(line: str) -> Grant | None:
    """Reads a line of `clients`; returns None if it holds no client.

    Raises:
      CodecError: It cannot be read; says what was expected.
    """
    words = line.partition("#")[0].split()
    return parse_words(words) if words else None


def parse_words(words: Sequence[str]) -> Grant:
    """Reads a client's name, public key and options; raises CodecError."""
    if len(words) < 2:
        raise CodecError("expected a name, a public key and options; got one word")
    name, key, *options = words
    is_invitation = key.startswith(formats.INVITATION)
    prefix = formats.INVITATION if is_invitation else formats.PUBLIC
    given: dict[str, Any] = {"name": name, "public": formats.decode(prefix, key)}
    if name in _RESERVED or name.startswith("envserve-"):
        raise CodecError("expected another name: no key, nor local, nor server")
    for option in options:
        word, _, value = option.partition("=")
        if word not in _FIELDS or not value or re.search(r"[\s#]", value):
            raise CodecError(
                f"expected options of {', '.join(sorted(_FIELDS))}, each with = and a "
                f"value without spaces and #; got {word.partition('.')[0]!r:.40}"
            )
        given[_FIELDS[word].name] = _value_of(word, value)
    if is_invitation != ("until" in given):
        raise CodecError("expected until= with an invitation, and only there")
    return Grant(**given | {"name": _value_of("name", name)})


def _value_of(option: str, text: str) -> Any:
    """Convert the text of an option, or of the name; raise CodecError."""
    if option in ("expires", "until"):
        return _seconds_of(option, text)
    value: Any = text
    if option in ("envs", "expose", "kwargs"):
        # Within brackets a comma is part of a word: "level:int[0,10]".
        value = tuple(re.split(r",(?![^\[]*\])", text))
    try:
        field = option if option == "name" else _FIELDS[option].name
        value = convert(value, _HINTS[field], is_strict=False)
        if option == "kwargs":
            check_ranges(value)
        return value
    except ValueError as error:
        # Without what came in words of types, and without who may leave it out.
        expected = re.sub(r"[,;] got .*| or None| - at .*", "", str(error))
        if option == "name":
            expected = "expected up to 64 of A-Z a-z 0-9 . _ -, the first no mark"
        shown = re.sub(r"(envserve-\w+-1)\..*", r"\1", text)  # no secret, whole
        raise CodecError(f"{option}: {expected}; got {shown!r:.200}") from None


def _seconds_of(option: str, text: str) -> float:
    try:
        end = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise CodecError(
            f"{option}: expected a date like 2027-01-01, or 2027-01-01T10:15:00Z; "
            f"got {text!r:.20}"
        ) from None
    return (end if end.tzinfo else end.replace(tzinfo=datetime.UTC)).timestamp()


def format_time(seconds: float) -> str:
    """Returns seconds since 1970 as `expires=` and `until=` take them."""
    time = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return time.isoformat().replace("+00:00", "Z")


def format_line(grant: Grant) -> str:
    """Returns the line of `clients` that `parse_line` reads as this grant."""
    prefix = formats.INVITATION if grant.is_invitation else formats.PUBLIC
    words = [f"{grant.name:12}", formats.encode(prefix, grant.public)]
    for option, field in _FIELDS.items():
        value: Any = getattr(grant, field.name)
        if value == field.default:
            continue
        if field.name in ("expires", "until"):
            value = format_time(value)
        elif isinstance(value, tuple):
            value = ",".join(value)
        words.append(f"{option}={value}")
    return " ".join(words)
