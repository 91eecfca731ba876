"""A function in a process of its own, which is given up after a time.

Whatever hangs, crashes or leaks in there ends with it, and so does all that it has
started.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.lab.processes import kill_all, with_descendants

_END_SECONDS = 10.0


class DidNotEnd(Exception):
    """The process hangs, or has ended without a result."""


def run_isolated(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    log: Path | None = None,
) -> Any:
    """Returns what a function of a module returns, called in another process.

    Args:
      log: Where its log goes, and what it and its processes write to stderr; None
        drops both.

    Raises:
      DidNotEnd: It took longer, and was killed; or its process has ended before.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, log, function, arguments))
    process.start()
    theirs.close()
    pid = process.pid
    assert pid is not None
    try:
        if not ours.poll(seconds):
            kill_all(with_descendants(pid))
            raise DidNotEnd(f"it did not end within {seconds:.0f} s, and was killed")
        return ours.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise DidNotEnd(
            f"its process ended with exit code {process.exitcode}, and no result"
        ) from None
    finally:
        ours.close()
        process.join(_END_SECONDS if process.exitcode is None else 0.0)
        if process.is_alive():
            kill_all(with_descendants(pid))
            process.join()
        process.close()


def _run(
    connection: Connection,
    log: Path | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    with open(os.devnull if log is None else log, "a") as file:
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO)
    # We were spawned, and would spawn by default; others are to find Python's default.
    multiprocessing.set_start_method(None, force=True)
    connection.send(function(*arguments))
    connection.close()
