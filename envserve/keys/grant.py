"""Grants: the keys and limits of clients, as lines of the `clients` file.

# name       public key                   limits
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

_Count = Annotated[int, Meta(ge=1)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_Pattern = Annotated[str, Meta(min_length=1)]

#: Reserved names, which no client in `clients` can have.
_RESERVED_NAMES: Final = ("local", "server")


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The name, key and limits of a client.

    If a limit is None, the server's own limit applies.
    """

    name: _Name
    public: bytes
    """Raw public key of the client, or of its invitation."""
    envs: tuple[_Pattern, ...] = ("*",)
    """Patterns of the env names that the client may lease."""
    max_envs: _Count | None = None
    max_processes: _Count | None = None
    max_leases: _Count | None = None
    max_row_mib: _Count | None = None
    exposed: tuple[ExposeRule, ...] | None = None
    allowed_kwargs: tuple[KwargRule, ...] | None = None
    share: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Weight of this client when clients compete for the server's time."""
    expires: float | None = None
    """Unix time in seconds at which the key expires."""
    until: float | None = None
    """Unix time in seconds at which an invitation expires; None for clients."""

    @property
    def is_invitation(self) -> bool:
        """Whether this is an invitation, whose key can only be used to join."""
        return self.until is not None

    def is_valid(self, now: float) -> bool:
        """Return whether the key is valid at `now`, a Unix time in seconds."""
        return all(end is None or now < end for end in (self.expires, self.until))

    def allows_env(self, env_name: str) -> bool:
        """Return whether the client may lease envs of this name."""
        return any(fnmatchcase(env_name, pattern) for pattern in self.envs)


_HINTS: Final = get_type_hints(Grant, include_extras=True)
#: Maps fields to options whose name is not the field's name with hyphens.
_OPTION_NAMES: Final = {"exposed": "expose", "allowed_kwargs": "kwargs"}
#: The field that each option in a line sets.
_FIELDS_BY_OPTION: Final = {
    _OPTION_NAMES.get(f.name, f.name.replace("_", "-")): f for f in fields(Grant)[2:]
}


def parse_line(line: str) -> Grant | None:
    """Parse a line of `clients`; return None if it contains no client.

    Raises:
      CodecError: The line is not valid.
    """
    words = line.partition("#")[0].split()
    return parse_words(words) if words else None


def parse_words(words: Sequence[str]) -> Grant:
    """Parse the name, public key and options of a client.

    Raises:
      CodecError: One of these words is not valid.
    """
    if len(words) < 2:
        raise CodecError("expected a name, a public key and options; got one word")
    name, key, *options = words
    is_invitation = key.startswith(formats.INVITATION)
    prefix = formats.INVITATION if is_invitation else formats.PUBLIC
    values: dict[str, Any] = {"name": name, "public": formats.decode(prefix, key)}
    if name in _RESERVED_NAMES or name.startswith("envserve-"):
        raise CodecError("expected a name other than local, server or a key")
    for option in options:
        keyword, _, value = option.partition("=")
        if keyword not in _FIELDS_BY_OPTION or not value or re.search(r"[\s#]", value):
            raise CodecError(
                f"unknown option or invalid value: {keyword.partition('.')[0]!r:.40}; "
                f"expected OPTION=VALUE without spaces or #, where OPTION is one of: "
                f"{', '.join(sorted(_FIELDS_BY_OPTION))}"
            )
        values[_FIELDS_BY_OPTION[keyword].name] = _convert_option(keyword, value)
    if is_invitation != ("until" in values):
        raise CodecError("expected until= for an invitation, and not for a client")
    return Grant(**values | {"name": _convert_option("name", name)})


def _convert_option(option: str, text: str) -> Any:
    """Convert the text of an option, or of the name, to the type of its field."""
    if option in ("expires", "until"):
        return _parse_time(option, text)
    value: Any = text
    if option in ("envs", "expose", "kwargs"):
        # A comma within brackets does not separate rules: "level:int[0,10]".
        value = tuple(re.split(r",(?![^\[]*\])", text))
    try:
        field = option if option == "name" else _FIELDS_BY_OPTION[option].name
        value = convert(value, _HINTS[field], is_strict=False)
        if option == "kwargs":
            check_ranges(value)
        return value
    except ValueError as error:
        # Remove the parts of msgspec's message that do not apply to a line of text.
        expected = re.sub(r"[,;] got .*| or None| - at .*", "", str(error))
        if option == "name":
            expected = (
                "expected up to 64 characters of A-Z a-z 0-9 . _ -, beginning with a "
                "letter or digit"
            )
        # Hide a key in the text, because it may be secret.
        safe_text = re.sub(r"(envserve-\w+-1)\..*", r"\1", text)
        raise CodecError(f"{option}: {expected}; got {safe_text!r:.200}") from None


def _parse_time(option: str, text: str) -> float:
    try:
        end = datetime.datetime.fromisoformat(text)
        end = end if end.tzinfo else end.replace(tzinfo=datetime.UTC)
        return end.astimezone(datetime.UTC).timestamp()
    except (ValueError, OverflowError):  # OverflowError: before the year 1
        raise CodecError(
            f"{option}: expected a date like 2027-01-01, or 2027-01-01T10:15:00Z; "
            f"got {text!r:.20}"
        ) from None


def format_time(seconds: float) -> str:
    """Return a Unix time in seconds as text in the form of `expires=` and `until=`."""
    time = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return time.isoformat().replace("+00:00", "Z")


def format_line(grant: Grant) -> str:
    """Return a grant as a line of `clients`; the inverse of `parse_line`."""
    prefix = formats.INVITATION if grant.is_invitation else formats.PUBLIC
    words = [f"{grant.name:12}", formats.encode(prefix, grant.public)]
    for option, field in _FIELDS_BY_OPTION.items():
        value: Any = getattr(grant, field.name)
        if value == field.default:
            continue
        if field.name in ("expires", "until"):
            value = format_time(value)
        elif isinstance(value, tuple):
            value = ",".join(value)
        words.append(f"{option}={value}")
    return " ".join(words)
