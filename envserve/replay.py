"""Plays what a repro file holds in a worker process, and tells whether it ends alike.

The env comes from the registry of the worker; nothing else that a file holds is run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envserve import codec
from envserve.channel import Frame, Kind, pack_frame
from envserve.errors import ReproError
from envserve.pool.launcher import Exit, Launcher, one_line
from envserve.pool.worker_handle import WorkerHandle
from envserve.repro import MAX_REPRO_BYTES, Repro, decode_repro, encode_repro
from envserve.slab import Status

__all__ = ["Ending", "describe_repro", "load_repro", "replay"]

#: How long building the env may take.
_BUILD_SECONDS: Final = 300.0
_EXIT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Ending:
    """How a replay has ended.

    Attributes:
      is_reproduced: Whether that is how, and where, the file says it ended.
      text: What happened, in words.
      number: Actions that had been begun; None if the env could not be built.
    """

    is_reproduced: bool
    text: str
    number: int | None


def load_repro(path: Path) -> Repro:
    """Reads a file.

    Raises:
      ReproError: It is no repro file.
      OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return decode_repro(file.read(MAX_REPRO_BYTES + 1))


def describe_repro(repro: Repro) -> str:
    """Says in a few lines what a file holds, and how well it can be followed."""
    played, end = repro.played, repro.end
    if played.seed is not None:
        start = f"a reset with seed {played.seed}"
    elif played.generator is not None:
        start = "a reset with the state that the env's generator had then"
    else:
        start = "a reset whose random numbers are not known"
    env = f"env {repro.env_index} of {one_line(repro.env_name)}"
    if repro.wrappers:
        env += f" in {one_line(', '.join(map(str, repro.wrappers)))}"
    lines = [
        f"{env}, incarnation {played.incarnation}",
        f"{start}, then {_actions(len(played.actions[0]))}",
        f"ended with {end.status.name}: {_cause_of(repro)}",
    ]
    doubts = []
    if played.num_missing:
        doubts.append(f"{_actions(played.num_missing)} before these are not known")
    if played.seed is None and played.generator is None:
        doubts.append("its random numbers are not")
    if played.is_touched:
        doubts.append("its attributes or methods were used as well, which is not kept")
    if doubts:
        lines.append(f"This may not end alike: {'; '.join(doubts)}.")
    return "\n".join(lines)


def replay(
    repro: Repro, launcher: Launcher, timeout_seconds: float | None = None
) -> Ending:
    """Builds the env anew in a process of its own, and applies the actions.

    Args:
      repro: What to play.
      launcher: Starts the process; has imported the modules that register own envs.
      timeout_seconds: How long a step, or the reset, may take before it counts as a
        hang; by default what the file says.
    """
    if timeout_seconds is None:
        timeout_seconds = repro.timeout_seconds
    with contextlib.closing(WorkerHandle(launcher)) as process:
        process.send(pack_frame(Kind.REPLAY, payload=encode_repro(repro)))
        try:
            return _follow(repro, process, timeout_seconds)
        finally:
            process.kill()


def _follow(repro: Repro, process: WorkerHandle, timeout_seconds: float) -> Ending:
    number: int | None = None
    for frame in _frames(process, timeout_seconds):
        if frame is None:
            return _judge(
                repro, number, Status.TIMEOUT, f"hung for {timeout_seconds:g} s"
            )
        if frame.kind is Kind.DONE:
            number = frame.sequence
        elif frame.kind is Kind.READY:
            text = f"did not crash in {_actions(len(repro.played.actions[0]))}"
            return Ending(False, text, number)
        elif frame.kind in (Kind.UNKNOWN_ENV, Kind.BAD_WRAPPER) or (
            frame.kind is Kind.FAILED and not frame.block
        ):
            text = frame.payload.decode(errors="replace").strip()
            hint = ", ".join(map(one_line, repro.import_modules))
            if hint:
                text += f"\nThe file was written where {hint} had been imported."
            return Ending(False, f"could not be played: {text}", None)
        elif frame.kind is Kind.FAILED:
            failure = codec.decode(frame.payload)
            return _judge(
                repro,
                number,
                Status.ENV_ERROR,
                failure["text"],
                is_violation=failure["violation"],
            )
    end = _exit_of(process)
    return _judge(
        repro,
        number,
        Status.WORKER_DIED,
        "\n".join(filter(None, [str(end), end.excerpt])),
        exit_code=end.exit_code,
    )


def _frames(process: WorkerHandle, timeout_seconds: float) -> Iterator[Frame | None]:
    """Yields what the process sends, up to its end; None if it hangs."""
    limit = _BUILD_SECONDS
    give_up_at = time.monotonic() + limit
    while not process.is_at_end:
        left = give_up_at - time.monotonic()
        if left <= 0:
            yield None
            return
        process.wait(left)
        process.flush()
        for frame in process.read():
            if frame.kind is Kind.BUILT:
                limit = timeout_seconds
            yield frame
            give_up_at = time.monotonic() + limit


def _exit_of(process: WorkerHandle) -> Exit:
    give_up_at = time.monotonic() + _EXIT_SECONDS
    while (end := process.poll_exit()) is None:
        if time.monotonic() > give_up_at:
            raise ReproError(
                f"expected {process!r} to end; its socket is closed, but it goes on"
            )
        time.sleep(0.002)
    return end


def _judge(
    repro: Repro,
    number: int | None,
    status: Status,
    text: str,
    *,
    exit_code: int | None = None,
    is_violation: bool = False,
) -> Ending:
    """Compares an ending with the one in the file."""
    end = repro.end
    where = "before the reset"
    if number is not None:
        where = f"in action {number}" if number else "in the reset"
    is_alike = status is end.status and number == len(repro.played.actions[0])
    if status is Status.WORKER_DIED:
        is_alike = is_alike and exit_code == end.exit_code
    elif status is Status.ENV_ERROR:
        is_alike = is_alike and is_violation == end.is_violation
        if not is_violation:
            is_alike = is_alike and _error_name(text) == _error_name(end.text)
    return Ending(is_alike, f"{where}: {text.strip()}", number)


def _error_name(text: str) -> str:
    """Returns the class of an exception, by the last line of its traceback."""
    return text.strip().rpartition("\n")[2].partition(":")[0]


def _cause_of(repro: Repro) -> str:
    # Of a stranger, maybe, and about to be shown on a terminal.
    return one_line(repro.end.text.strip().rpartition("\n")[2])


def _actions(number: int) -> str:
    return "1 action" if number == 1 else f"{number} actions"
