"""Each case runs in a process of its own, which measures when told to.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from envserve.bench import interleaved
from envserve.bench.interleaved import Measure, Measurements
from envserve.errors import EnvserveError

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
      open: A function of a module, since it is called in another process; its context
        manager gives a `Measure`.
    """

    name: str
    open: Callable[..., AbstractContextManager[Measure]]
    arguments: Mapping[str, Any] = field(default_factory=dict)


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Returns the cases whose names have one of some words in them; without, all.

    Raises:
      BenchmarkError: There is no such case.
    """
    names = [case.name for case in cases]
    for word in only:
        if not any(word.lower() in name.lower() for name in names):
            raise BenchmarkError(
                f"--only: expected part of one of {', '.join(names)}; got {word!r}"
            )
    words = [word.lower() for word in only] or [""]
    return [case for case in cases if any(w in case.name.lower() for w in words)]


def measure_cases(
    cases: Sequence[Case],
    repetitions: int,
    say: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measures every case once per repetition, in turns, with all open at once.

    Raises:
      BenchmarkError: A case failed, or all must be skipped.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_CaseProcess(case)) for case in cases]
        ready, skipped = {}, {}
        for process in running:
            say(f"... starting {process.name}")
            reason = process.wait_until_ready()
            if reason is None:
                ready[process.name] = process.measure
            else:
                skipped[process.name] = reason
        if not ready:
            reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
            raise BenchmarkError(f"nothing can be measured: {reasons}")
        return Measurements(
            interleaved.interleave(ready, repetitions, say).by_case, skipped
        )


class _CaseProcess:
    """Runs a case; a context manager that ends it."""

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = case.name
        self._connection, theirs = context.Pipe()
        # Not a daemon, which could have no processes of its own.
        self._process = context.Process(target=_serve, args=(case, theirs))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> str | None:
        """Returns why the case must be skipped, or None once it can be measured."""
        kind, value = self._receive()
        return str(value) if kind == "skipped" else None

    def measure(self) -> dict[str, float]:
        """Returns what one more measurement gives."""
        self._connection.send("measure")
        return dict(self._receive()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # it reads the end of file, and ends
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
            text = f"{self.name} failed; {_REMEDY}. Its traceback:\n{value}"
            raise BenchmarkError(text)
        if kind == "refused":
            raise BenchmarkError(f"{self.name} failed: {value}")
        return kind, value


def _serve(case: Case, connection: Connection) -> None:
    """Serves measurements of a case until the other end is closed."""
    # Ctrl-C reaches the whole group; the parent ends us, and we whom we have started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # Some peers load TensorFlow, which they have no use for here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # We were spawned, and would spawn by default; peers are to find Python's default.
    multiprocessing.set_start_method(None, force=True)
    # The other end is closed where another case has failed: nobody wants to know.
    with contextlib.suppress(BrokenPipeError):
        try:
            with case.open(**case.arguments) as measure:
                connection.send(("ready", None))
                while _is_told_to_measure(connection):
                    connection.send(("measured", measure()))
        except Skip as reason:
            connection.send(("skipped", str(reason)))
        except EnvserveError as error:  # its text says what to do
            connection.send(("refused", str(error)))
        except Exception:
            connection.send(("failed", traceback.format_exc()))


def _is_told_to_measure(connection: Connection) -> bool:
    try:
        connection.recv()
    except (EOFError, ConnectionResetError):
        return False
    return True
