"""Ctrl-C at a chosen line of a call."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import envserve

PACKAGE = str(Path(envserve.__file__).parent)
#: A line of a file.
Place = tuple[str, int]


def is_ours(path: str) -> bool:
    """Whether a file is one of the package's."""
    return path.startswith(PACKAGE)


def run_traced(
    call: Callable[[], Any], line: int, is_traced: Callable[[str], bool] = is_ours
) -> list[Place]:
    """Calls, interrupted before the so manieth line; returns the lines that came.

    Args:
      call: What to call.
      line: From 1; with -1 nothing is interrupted.
      is_traced: Tells the paths of files whose lines count.
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
    """Tells the line that returns a step, which is lost between two bytecodes there."""
    return linecache.getline(*place).strip() == "return result"


def _is_spared(frame: FrameType) -> bool:
    """Tells lines before an `__exit__`, and of `try`, where no signals are handled."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))
