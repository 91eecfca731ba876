"""Text of others, made fit for terminals, logs and strangers.

What an env, a client or a server says may hold escape sequences, marks that turn the
direction of writing, newlines without end, and paths of the host that it comes from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

__all__ = [
    "LogThrottle",
    "Name",
    "did_you_mean",
    "one_line",
    "printable",
    "without_folders",
]

#: What a peer may call an env.
Name = Annotated[str, Meta(max_length=200)]

#: Of a traceback's line, and of any other absolute path.
_FOLDERS: Final = re.compile(r'(?<=File ")/[^"\n]*/|(?<![\w:/.])/(?:[^\s/\'"]+/)+')
_SECONDS: Final = 1.0
#: Of an env's name: what is left out to compare it, and what ends a module before it.
_VERSION: Final = re.compile(r"-v\d+$")
_LAST: Final = re.compile(r"[:/]")
_FEW: Final = 5


def one_line(text: str, max_length: int | None = None) -> str:
    """Returns a text, or so much of it, with all that is not printable escaped."""
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:max_length].rstrip()
    )
    return line[:max_length]


def printable(text: str) -> str:
    """Returns the same with its newlines, for tracebacks."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def without_folders(text: str) -> str:
    """Returns a text in which absolute paths are names of files only."""
    return _FOLDERS.sub("", text)


def did_you_mean(env_name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean A or B?" of names that are near, or all if they are few.

    Versions, and whether letters are small, make no difference; a module or namespace
    may be missing.
    """
    names = list(known)
    bases = {_VERSION.sub("", name).lower(): name for name in names}
    found = {_LAST.split(base)[-1]: name for base, name in bases.items()} | bases
    base = _VERSION.sub("", env_name).lower()
    near = difflib.get_close_matches(base, found, n=3, cutoff=0.75)
    if near:
        return f"; did you mean {' or '.join({found[key]: 0 for key in near})}?"
    return f"; there is only {', '.join(names)}" if 0 < len(names) <= _FEW else ""


class LogThrottle:
    """Let one line of each kind through per second; count the suppressed ones."""

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[float, int]] = {}

    def passes(self, kind: object, now: float) -> str | None:
        """Return a suffix for the line, or None if the line must not be logged.

        The suffix tells how many lines of this kind were suppressed since the last one.
        """
        due_at, left_out = self._kinds.get(kind, (now, 0))
        if now < due_at:
            self._kinds[kind] = due_at, left_out + 1
            return None
        self._kinds[kind] = now + _SECONDS, 0
        return f" (and {left_out} more that were not logged)" if left_out else ""
