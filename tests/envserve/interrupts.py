"""Raise KeyboardInterrupt at a chosen line of a call."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import envserve

PACKAGE = str(Path(envserve.__file__).parent)
#: A path and a line number.
Place = tuple[str, int]


def is_ours(path: str) -> bool:
    """Return whether a file belongs to the envserve package."""
    return path.startswith(PACKAGE)


def run_traced(
    call: Callable[[], Any], line: int, is_traced: Callable[[str], bool] = is_ours
) -> list[Place]:
    """Run a call and interrupt it before its nth line; return the executed lines.

    Args:
      call: The function to call.
      line: The line to interrupt, counted from 1; -1 for none.
      is_traced: Returns whether the lines of a file count.
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
    """Return whether the line returns a step; an interrupt there drops its result."""
    return linecache.getline(*place).strip() == "return result"


def _is_spared(frame: FrameType) -> bool:
    """Return whether Python handles no signal at this line: `with` or `try`."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))
