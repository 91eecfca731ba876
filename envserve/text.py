"""Sanitise text from envs and peers, suggest remedies, and throttle log lines.

Text from an env, a client or a server may contain terminal escape sequences, characters
that reverse the text direction, any number of newlines, and paths of its host.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

#: A name in a message, such as that of an env or client; at most 200 characters.
Name = Annotated[str, Meta(max_length=200)]

#: Matches the folders of an absolute path, in a traceback line or elsewhere.
_FOLDERS: Final = re.compile(r'(?<=File ")/[^"\n]*/|(?<![\w:/.])/(?:[^\s/\'"]+/)+')
#: Matches the path of the clone in an install command; `without_folders` replaces the
#: path with ".".
_CLONE: Final = re.compile(r"-e '/[^'\n]*(?=\[\w+\]')")
#: Minimum time in seconds between two log lines of the same kind.
LOG_INTERVAL: Final = 1.0
#: Maximum number of characters, and of words in them, that `words_without_numbers`
#: considers at the end of a message.
_MAX_COMPARED_CHARS: Final = 1 << 12
_MAX_COMPARED_WORDS: Final = 50
_WORD: Final = re.compile(r'^  File ".*|[^\W_]+(?:-[^\W_]+)*', re.MULTILINE)
_NUMBER: Final = re.compile(r"\d|^(nan|inf)$")
#: Units of durations and their lengths in seconds.
_UNITS: Final = (
    ("d", 86400),
    ("h", 3600),
    ("min", 60),
    ("s", 1),
    ("ms", 1e-3),
    ("us", 1e-6),
)
#: The version of an env name, which is ignored when names are compared.
_VERSION: Final = re.compile(r"-v\d+$")
#: Separators between a module or namespace and the name of an env.
_SEPARATOR: Final = re.compile(r"[:/]")
#: If no known name is similar, at most this many known names are listed.
_MAX_SHOWN_NAMES: Final = 5


def one_line(text: str, max_length: int | None = None) -> str:
    """Return text as one line, with unprintable characters escaped.

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


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or a fixed text if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def printable(text: str) -> str:
    """Return text in which all unprintable characters except newlines are escaped."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def without_folders(text: str) -> str:
    """Return text in which absolute paths are reduced to their file names."""
    return _FOLDERS.sub("", _CLONE.sub("'.", text))


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives a value of at least 1."""
    unit, length = next((u for u in _UNITS if seconds >= u[1]), _UNITS[-1])
    return f"{float(f'{seconds / length:.3g}'):,g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, such as "1 episode" or "1,000 episodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rounded(number: float) -> str:
    """Return a number with one decimal; below 1, with three significant digits."""
    # Values below 1e-6 are usually rounding errors.
    return f"{number:.3g}" if 1e-6 < abs(number) < 1 else f"{number:.1f}"


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article, such as "an int" or "a list"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def did_you_mean(env_name: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?" with the known names that are similar.

    If no name is similar, list the known names, or return "" if there are too many. The
    comparison ignores case and version; the module or namespace may be missing.
    """
    names = list(known)
    bases = {_VERSION.sub("", name).lower(): name for name in names}
    by_key = {_SEPARATOR.split(base)[-1]: name for base, name in bases.items()} | bases
    base = _VERSION.sub("", env_name).lower()
    matches = difflib.get_close_matches(base, by_key, n=3, cutoff=0.75)
    if matches:
        return f"; did you mean {' or '.join({by_key[key]: 0 for key in matches})}?"
    if 0 < len(names) <= _MAX_SHOWN_NAMES:
        return f"; there is only {', '.join(names)}"
    return ""


def nearest_name(word: str, known: Iterable[str]) -> str:
    """Return the known name that is probably meant; "" if none is similar.

    Names that begin with the word come first, then those that contain it, then those
    with a similar spelling.
    """
    names = list(known)
    containing = sorted(
        (name for name in names if len(word) > 2 and word in name),
        key=lambda name: (not name.startswith(word), len(name)),
    )
    matches = containing or difflib.get_close_matches(word, names, 1, cutoff=0.7)
    return matches[0] if matches else ""


def clone_folder() -> Path | None:
    """Return the clone that this package is imported from; None if it is installed."""
    folder = Path(__file__).parents[1]
    return folder if (folder / "pyproject.toml").is_file() else None


def install_command(extra: str) -> str:
    """Return the command that installs an extra of envserve on this host."""
    if (folder := clone_folder()) is None:
        return f"pip install 'envserve[{extra}]'"
    return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"


def exception_line(traceback: str) -> str:
    """Return the line of a traceback that names the exception.

    The other lines of the exception's message follow it, and so do its notes and, for
    an exception group, its members. If the traceback was cut such that it contains no
    frame, return its last line.
    """
    # Lines of a group begin with "  | "; those of its members are indented further.
    lines = [line.removeprefix("  | ") for line in traceback.rstrip().split("\n")]
    frames = (n for n, line in enumerate(lines) if line.startswith('  File "'))
    start = max(frames, default=len(lines) - 1)
    return next((line for line in lines[start:] if line[:1].strip()), lines[-1])


def words_without_numbers(text: str) -> tuple[str, ...]:
    """Return the last words of a message, to compare messages that differ in numbers.

    Words that contain a digit (seeds, ids, addresses, coordinates) are omitted, and so
    is punctuation. A line of a traceback that names a file counts as one word, because
    its line number distinguishes faults with the same text.

    Args:
      text: The text; only its last 4,096 characters are considered.
    """
    words = _WORD.findall(text[-_MAX_COMPARED_CHARS:])
    selected = [w for w in words if w.startswith("  File") or not _NUMBER.search(w)]
    return tuple(selected[-_MAX_COMPARED_WORDS:])


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
          is_new: Whether to admit the line regardless of the limit.

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

    def take_suppressed(self, kind: object, now: float, least_age: float = 0.0) -> str:
        """Return "N more in the last T s" if lines were suppressed, and reset N.

        Return "" if there were none, or if the last line is younger than `least_age`
        seconds.
        """
        logged_at, num_suppressed = self._kinds.get(kind, (now, 0))
        if now < logged_at + least_age:
            return ""
        self._kinds[kind] = logged_at, 0
        if not num_suppressed:
            return ""
        return f"{num_suppressed:,} more in the last {now - logged_at:.1f} s"
