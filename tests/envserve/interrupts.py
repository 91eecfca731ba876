"""Raise KeyboardInterrupt at a chosen line during a call."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import envserve

PACKAGE = str(Path(envserve.__file__).parent)
#: A file's path and a line number.
Place = tuple[str, int]


def is_ours(path: str) -> bool:
    """Return whether a file belongs to the package."""
    return path.startswith(PACKAGE)


def run_traced(
    call: Callable[[], Any], line: int, is_traced: Callable[[str], bool] = is_ours
) -> list[Place]:
    """Run a call, interrupt it before a line, and return all lines executed until then.

    Args:
      call: The function to call.
      line: Interrupt before this executed line, counting from 1; -1 never interrupts.
      is_traced: Function that takes a file's path, and returns whether to count its
      lines.
    """
    places: list[Place] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not is_traced(frame.f_code.co_filename):
            return None
        if event == "line" and not _is_spared(frame):
            places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(places) == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert len(places) == line
    finally:
        sys.settrace(previous)
    return places


def is_return(place: Place) -> bool:
    """Return whether a line returns a result, which an interrupt there may lose."""
    line = linecache.getline(*place).strip()
    return line in ("return result", "self._lock.release()")


def _is_spared(frame: FrameType) -> bool:
    """Return whether a line begins with `with` or `try`, and must not be interrupted.

    Python handles no signals at `try` and between the body of `with` and `__exit__`.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))
