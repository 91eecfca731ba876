"""Sanitise text from envs and peers, suggest names, and throttle log lines.

Text from an env, a client or a server may contain terminal escape sequences, characters
that reverse the text direction, any number of newlines, and paths of its host.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

#: A name in a message, such as that of an env or client; at most 200 characters.
Name = Annotated[str, Meta(max_length=200)]

#: The folders in a line of a traceback, and in any other absolute path.
_FOLDERS: Final = re.compile(r'(?<=File ")/[^"\n]*/|(?<![\w:/.])/(?:[^\s/\'"]+/)+')
#: Minimum time in seconds between two log lines of the same kind.
LOG_INTERVAL: Final = 1.0
#: The parts of a text that `words_without_numbers` compares.
_MAX_COMPARED_CHARS: Final = 1 << 12
_MAX_COMPARED_WORDS: Final = 50
_WORD: Final = re.compile(r'^  File ".*|[^\W_]+(?:-[^\W_]+)*', re.MULTILINE)
_NUMBER: Final = re.compile(r"\d|^(nan|inf)$")
#: The version of an env name, which is ignored when names are compared.
_VERSION: Final = re.compile(r"-v\d+$")
#: Separators between a module or namespace and the name of an env.
_SEPARATOR: Final = re.compile(r"[:/]")
#: Maximum number of known names for which all of them are shown.
_MAX_SHOWN_NAMES: Final = 5


def one_line(text: str, max_length: int | None = None) -> str:
    """Return a text as one line, with unprintable characters escaped.

    Args:
      text: The text.
      max_length: Maximum length of the result in characters; longer text is cut. None
        for no limit.
    """
    line = text[:max_length].rstrip()
    if not line.isprintable():
        line = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in line
        )
    return line[:max_length]


def printable(text: str) -> str:
    """Return a text with unprintable characters escaped, except newlines."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def without_folders(text: str) -> str:
    """Return a text in which absolute paths are reduced to their file names."""
    return _FOLDERS.sub("", text)


def did_you_mean(env_name: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?" with the known names that are similar.

    If no name is similar, list the known names, or return "" if there are too many. The
    comparison ignores case and version; the module or namespace may be missing.
    """
    names = list(known)
    bases = {_VERSION.sub("", name).lower(): name for name in names}
    found = {_SEPARATOR.split(base)[-1]: name for base, name in bases.items()} | bases
    base = _VERSION.sub("", env_name).lower()
    near = difflib.get_close_matches(base, found, n=3, cutoff=0.75)
    if near:
        return f"; did you mean {' or '.join({found[key]: 0 for key in near})}?"
    if 0 < len(names) <= _MAX_SHOWN_NAMES:
        return f"; there is only {', '.join(names)}"
    return ""


def words_without_numbers(text: str) -> tuple[str, ...]:
    """Return the last words of a text, to compare texts that may differ in numbers.

    Words that contain a digit (seeds, ids, addresses, coordinates) and punctuation are
    omitted. A line of a traceback that names a file counts as one word, because its
    line number distinguishes faults with the same text.

    Args:
      text: The text; only its last 4,096 characters are considered.
    """
    words = _WORD.findall(text[-_MAX_COMPARED_CHARS:])
    kept = [w for w in words if w.startswith("  File") or not _NUMBER.search(w)]
    return tuple(kept[-_MAX_COMPARED_WORDS:])


class LogThrottle:
    """Admits one log line of each kind per second, and counts suppressed lines."""

    def __init__(self) -> None:
        # Time of each kind's last line, and number of lines suppressed since then.
        self._kinds: dict[object, tuple[float, int]] = {}

    def admit(self, kind: object, now: float, *, is_new: bool = False) -> str | None:
        """Return a suffix for the line, or None if the line must not be logged.

        Args:
          kind: Kind of the line; each kind has its own limit.
          now: Time in monotonic seconds.
          is_new: Whether to admit the line in any case.

        Returns:
          The number of lines of this kind that were suppressed since the last one, as
          text to append to the line; "" if there were none.
        """
        logged_at, num_suppressed = self._kinds.get(kind, (-math.inf, 0))
        if now < logged_at + LOG_INTERVAL and not is_new:
            self._kinds[kind] = logged_at, num_suppressed + 1
            return None
        more = self.take_suppressed(kind, now)
        self._kinds[kind] = now, 0
        return f" (and {more})" if more else ""

    def take_suppressed(self, kind: object, now: float) -> str:
        """Return "N more in the last T s" if lines were suppressed, and reset N."""
        logged_at, num_suppressed = self._kinds.get(kind, (now, 0))
        self._kinds[kind] = logged_at, 0
        if not num_suppressed:
            return ""
        return f"{num_suppressed:,} more in the last {now - logged_at:.1f} s"
