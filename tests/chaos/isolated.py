"""Runs a function in its own process with a time limit.

The process and all its descendants are killed at the end of the time limit.
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

from benchmarks.support.processes import kill_all, with_descendants

_END_SECONDS = 10.0


class DidNotEnd(Exception):
    """The process hung, or exited without a result."""


def run_isolated(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    log: Path | None = None,
) -> Any:
    """Return the result of a module-level function, called in another process.

    Args:
      seconds: The time limit.
      log: File for the log and the stderr of the process; None discards both.

    Raises:
      DidNotEnd: The time limit passed, or the process exited without a result.
    """
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_run, args=(child, log, function, arguments))
    process.start()
    child.close()
    pid = process.pid
    assert pid is not None
    try:
        if not parent.poll(seconds):
            kill_all(with_descendants(pid))
            raise DidNotEnd(f"the process was killed after {seconds:.0f} s")
        return parent.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise DidNotEnd(
            f"the process ended with exit code {process.exitcode} and no result"
        ) from None
    finally:
        parent.close()
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
    # The start method of a spawned process is "spawn"; restore Python's default.
    multiprocessing.set_start_method(None, force=True)
    connection.send(function(*arguments))
    connection.close()
