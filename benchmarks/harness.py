"""Measure cases alternately, each in its own process.

Separate processes do not share threads, imports or an interpreter lock. While another
case is measured, the process of a case waits for a message on its pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from envserve.bench import interleaved
from envserve.bench.interleaved import Measure, Measurements
from envserve.errors import EnvserveError

#: Timeout for closing a case. Some projects take long to close 64 processes.
_CLOSE_SECONDS: Final = 30.0
_REMEDY: Final = "exclude it by selecting other cases with --only"


class Skip(Exception):
    """Raised by `Case.open` if the case cannot run here; the message states why."""


class BenchmarkError(RuntimeError):
    """A benchmark failed; the message contains the case's traceback, if any."""


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Attributes:
      open: A module-level function, because it is called in another process. It returns
      a context manager that yields a `Measure`.
    """

    name: str
    open: Callable[..., AbstractContextManager[Measure]]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Return the cases whose names contain a word of `only`; if it is empty, all cases.

    Raises:
      BenchmarkError: A word is not contained in any name.
    """
    names = [case.name for case in cases]
    for word in only:
        if not any(word.lower() in name.lower() for name in names):
            raise BenchmarkError(
                f"--only: expected a part of a case name ({', '.join(names)}); got "
                f"{word!r}"
            )
    words = [word.lower() for word in only] or [""]
    return [case for case in cases if any(w in case.name.lower() for w in words)]


def measure_cases(
    cases: Sequence[Case],
    repetitions: int,
    print_progress: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Open all cases, and measure them alternately, each once per repetition.

    Raises:
      BenchmarkError: A case failed, or all cases were skipped.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_CaseProcess(case)) for case in cases]
        ready, skipped = {}, {}
        for process in running:
            print_progress(f"... starting {process.name}")
            reason = process.wait_until_ready()
            if reason is None:
                ready[process.name] = process.measure
            else:
                skipped[process.name] = reason
        if not ready:
            reasons = "; ".join(f"{k}: {reason}" for k, reason in skipped.items())
            raise BenchmarkError(f"no case can be measured: {reasons}")
        return Measurements(
            interleaved.interleave(ready, repetitions, print_progress).by_case, skipped
        )


class _CaseProcess:
    """Process that measures a case; a context manager that ends the process."""

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = case.name
        self._connection, child_end = context.Pipe()
        # The process is not a daemon, because daemons cannot start child processes.
        self._process = context.Process(target=_serve, args=(case, child_end))
        self._process.start()
        child_end.close()

    def wait_until_ready(self) -> str | None:
        """Wait until the case is ready; return the reason if it is skipped, or None."""
        kind, value = self._receive()
        return str(value) if kind == "skipped" else None

    def measure(self) -> dict[str, float]:
        """Measure the case once; return a dict from metrics to values."""
        self._connection.send("measure")
        return dict(self._receive()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # `_serve` then returns, and the process exits
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
                f"{self.name}: the process of this case exited with code "
                f"{self._process.exitcode}; {_REMEDY}"
            ) from None
        if kind == "failed":
            text = f"{self.name} failed; {_REMEDY}. Its traceback:\n{value}"
            raise BenchmarkError(text)
        if kind == "error":
            raise BenchmarkError(f"{self.name} failed: {value}")
        return kind, value


def _serve(case: Case, connection: Connection) -> None:
    """Measure a case on each request, until the other end of the pipe is closed."""
    # Ctrl-C signals all processes of the group. Ignore it here: the parent ends this
    # process, which then stops its child processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # Silence TensorFlow, which some projects load although no case uses it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # This process was spawned, so its start method is also "spawn". Other projects
    # expect the default method of the platform.
    multiprocessing.set_start_method(None, force=True)
    # If another case has failed, the parent has closed its end of the pipe.
    with contextlib.suppress(BrokenPipeError):
        try:
            with case.open(**case.arguments) as measure:
                connection.send(("ready", None))
                while _receive_request(connection):
                    connection.send(("measured", measure()))
        except Skip as reason:
            connection.send(("skipped", str(reason)))
        except EnvserveError as error:  # the message is complete without a traceback
            connection.send(("error", str(error)))
        except Exception:
            connection.send(("failed", traceback.format_exc()))


def _receive_request(connection: Connection) -> bool:
    """Wait for a request; return False if the other end of the pipe is closed."""
    try:
        connection.recv()
    except (EOFError, ConnectionResetError):
        return False
    return True
