"""A case of a benchmark in a process of its own, which measures when told to.

Apart from each other, cases share neither threads nor imports nor an interpreter's
lock, and one that is not having its turn waits for a byte.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from envserve.errors import EnvserveError

__all__ = ["BenchmarkError", "Case", "CaseProcess", "Measure", "Skip"]

Measure = Callable[[], Mapping[str, float]]
"""Measures once; returns numbers by name."""

#: Closing 64 processes of a peer may take long.
_CLOSE_SECONDS: Final = 30.0
_REMEDY: Final = "leave it out by naming the others with --only"


class Skip(Exception):
    """Raised by the opener of a case that cannot run here; says why."""


class BenchmarkError(RuntimeError):
    """A benchmark cannot go on; says why, with the traceback of a case that failed."""


@dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
      name: How it is called in tables.
      open: A function of a module, since it is called in another process; its context
        manager gives a `Measure`.
      arguments: Its keyword arguments.
    """

    name: str
    open: Callable[..., AbstractContextManager[Measure]]
    arguments: Mapping[str, Any] = field(default_factory=dict)


class CaseProcess:
    """Runs a case; a context manager that ends it."""

    def __init__(self, case: Case) -> None:
        """Starts the process; `wait_until_ready` waits for it."""
        context = multiprocessing.get_context("spawn")
        self._case = case
        self._connection, theirs = context.Pipe()
        # Not a daemon, which could have no processes of its own.
        self._process = context.Process(target=_run, args=(case, theirs))
        self._process.start()
        theirs.close()

    @property
    def name(self) -> str:
        """Name of the case."""
        return self._case.name

    def wait_until_ready(self) -> str | None:
        """Returns why the case must be skipped, or None once it can be measured.

        Raises:
          BenchmarkError: It failed.
        """
        kind, value = self._receive()
        return str(value) if kind == "skipped" else None

    def measure(self) -> dict[str, float]:
        """Returns what one more measurement gives.

        Raises:
          BenchmarkError: It failed.
        """
        self._connection.send("measure")
        _, value = self._receive()
        return dict(value)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process: its end of the pipe reads the end of file."""
        self._connection.close()
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self._process.join(_CLOSE_SECONDS)
            raise BenchmarkError(
                f"{self.name}: its process ended with exit code "
                f"{self._process.exitcode}; {_REMEDY}"
            ) from None
        if kind == "failed":
            raise BenchmarkError(
                f"{self.name} failed; {_REMEDY}. Its traceback:\n{value}"
            )
        if kind == "refused":
            raise BenchmarkError(f"{self.name} failed: {value}")
        return kind, value


def _run(case: Case, connection: Connection) -> None:
    """Serves measurements of a case until the other end is closed."""
    # Ctrl-C reaches the whole group; the parent ends us, and we whom we have started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # Some peers load TensorFlow, which they have no use for here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # We were spawned, and would spawn by default; peers are to find Python's default.
    multiprocessing.set_start_method(None, force=True)
    try:
        with case.open(**case.arguments) as measure:
            _tell(connection, "ready", None)
            while _is_told_to_measure(connection):
                _tell(connection, "measured", measure())
    except Skip as reason:
        _tell(connection, "skipped", str(reason))
    except EnvserveError as error:  # its text says what to do
        _tell(connection, "refused", str(error))
    except Exception:
        _tell(connection, "failed", traceback.format_exc())


def _tell(connection: Connection, kind: str, value: Any) -> None:
    # The other end is closed where another case has failed: nobody wants to know.
    with contextlib.suppress(BrokenPipeError):
        connection.send((kind, value))


def _is_told_to_measure(connection: Connection) -> bool:
    try:
        connection.recv()
    except (EOFError, ConnectionResetError):
        return False
    return True
