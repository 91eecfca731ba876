"""Plays what a repro file holds in a worker process, and tells whether it ends alike.

The env comes from the registry of the worker; nothing else that a file holds is run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from envserve.crashes.repro_file import (
    MAX_REPRO_BYTES,
    End,
    Repro,
    decode_repro,
    encode_repro,
)
from envserve.errors import ReproError
from envserve.pool.launcher import Launcher, WorkerProcess
from envserve.slab import Status
from envserve.spaces import codec
from envserve.text import one_line
from envserve.worker.channel import ChannelMessage, Kind, pack_message

__all__ = ["ReplayResult", "describe_repro", "load_repro", "replay"]

OnFrame = Callable[[float, Any], None]

#: How long building the env may take.
_BUILD_SECONDS: Final = 300.0
_EXIT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class ReplayResult:
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
    """Reads a file; raises ReproError if it is no repro file, or cannot be read."""
    try:
        with path.open("rb") as file:
            return decode_repro(file.read(MAX_REPRO_BYTES + 1))
    except OSError as error:
        raise ReproError(
            f"{path}: expected a repro file; {error.strerror}; the line of a crash in "
            f"the log names its file"
        ) from None


def describe_repro(repro: Repro) -> str:
    """Says in a few lines what a file holds, and how well it can be followed."""
    played = repro.played
    start, doubts = "a reset whose random numbers are not known", []
    if played.seed is not None:
        start = f"a reset with seed {played.seed}"
    elif played.generator is not None:
        start = "a reset with the state that the env's generator had then"
    else:
        doubts.append("its random numbers are not")
    if played.num_missing:
        missing = f"{_actions(played.num_missing)} before these are not known"
        doubts.insert(0, missing)
    if played.misses_options:
        doubts.append("options of its reset, or of an earlier one, are not kept")
    if played.is_touched:
        doubts.append("its attributes or methods were used as well, which is not kept")
    env = f"env {repro.env_index} of {one_line(repro.env_name)}"
    if repro.wrappers:
        env += f" in {one_line(', '.join(map(str, repro.wrappers)))}"
    # The cause is of a stranger, maybe, and about to be shown on a terminal.
    cause = one_line(repro.end.text.strip().rpartition("\n")[2])
    lines = [
        f"{env}, incarnation {played.incarnation}",
        f"{start}, then {_actions(len(played.actions[0]))}",
        f"ended with {repro.end.status.name}: {cause}",
    ]
    if doubts:
        lines.append(f"This may not end alike: {'; '.join(doubts)}.")
    return "\n".join(lines)


def replay(
    repro: Repro,
    launcher: Launcher,
    timeout_seconds: float | None = None,
    on_frame: OnFrame | None = None,
    num_frames: int = 0,
) -> ReplayResult:
    """Builds the env anew in a process of its own, and applies the actions.

    Args:
      repro: What to play.
      launcher: Starts the process; has imported the modules that register own envs.
      timeout_seconds: How long a step, or the reset, may take before it counts as a
        hang; by default what the file says.
      on_frame: Called with the frames per second and the frame that the env renders
        before each of the last `num_frames` actions.
      num_frames: Number of frames to render.
    """
    if timeout_seconds is None:
        timeout_seconds = repro.timeout_seconds
    process = launcher.launch()
    with contextlib.closing(process.channel):
        if on_frame:
            kwargs = {**repro.env_kwargs, "render_mode": "rgb_array"}
            repro = replace(repro, env_kwargs=kwargs)
        number, payload = num_frames if on_frame else 0, encode_repro(repro)
        process.channel.send(pack_message(Kind.REPLAY, 0, number, payload))
        try:
            return _follow(repro, process, timeout_seconds, on_frame)
        finally:
            process.kill("it is done", time.monotonic())


def _follow(
    repro: Repro,
    process: WorkerProcess,
    timeout_seconds: float,
    on_frame: OnFrame | None,
) -> ReplayResult:
    number: int | None = None
    for message in _messages(process, timeout_seconds):
        if not isinstance(message, ChannelMessage):
            end = End(status=Status.TIMEOUT, text=f"hung for {message:g} s")
            return _judge(repro, number, end)
        if message.kind is Kind.DONE:
            number = message.sequence
        elif message.kind is Kind.VIDEO_FRAME:
            if on_frame:
                on_frame(*codec.decode(message.payload))
        elif message.kind is Kind.READY:
            text = f"did not crash in {_actions(len(repro.played.actions[0]))}"
            if repro.end.status is Status.OK:  # a flight record
                return ReplayResult(True, f"to its end: {text}", number)
            return ReplayResult(False, text, number)
        elif message.kind is Kind.FAILED and message.block:
            failure = codec.decode(message.payload)
            return _judge(repro, number, End(status=Status.ENV_ERROR, **failure))
        else:
            text = message.payload.decode(errors="replace").strip()
            hint = ", ".join(map(one_line, repro.import_modules))
            if hint:
                text += f"\nThe file was written where {hint} had been imported."
            return ReplayResult(False, f"could not be played: {text}", None)
    end_ = process.wait_exit(_EXIT_SECONDS)
    if end_ is None:
        raise ReproError(
            f"expected {process!r} to end; its socket is closed, but it goes on"
        )
    text = "\n".join(filter(None, [str(end_), end_.excerpt]))
    end = End(status=Status.WORKER_DIED, text=text, exit_code=end_.exit_code)
    return _judge(repro, number, end)


def _messages(
    process: WorkerProcess, timeout_seconds: float
) -> Iterator[ChannelMessage | float]:
    """Yields what the process sends once the env is built; if it hangs, how long."""
    limit = _BUILD_SECONDS
    give_up_at = time.monotonic() + limit
    while not process.channel.is_at_end:
        left = give_up_at - time.monotonic()
        if left <= 0:
            yield limit
            return
        process.channel.wait(left)
        for message in process.channel.read():
            if message.kind is Kind.BUILT:
                limit = timeout_seconds
            else:
                yield message
            give_up_at = time.monotonic() + limit


def _judge(repro: Repro, number: int | None, found: End) -> ReplayResult:
    """Compares an ending with the one in the file."""
    where = "before the reset"
    if number is not None:
        where = f"in action {number}" if number else "in the reset"
    is_alike = number == len(repro.played.actions[0])
    is_alike = is_alike and _signs(found) == _signs(repro.end)
    return ReplayResult(is_alike, f"{where}: {found.text.strip()}", number)


def _signs(end: End) -> tuple[object, ...]:
    """Returns by what an ending is known again."""
    if end.status is Status.WORKER_DIED:
        return end.status, end.exit_code
    if end.status is Status.ENV_ERROR and not end.is_violation:
        # The class of the exception, by the last line of its traceback.
        return end.status, end.text.strip().rpartition("\n")[2].partition(":")[0]
    return end.status, end.is_violation


def _actions(number: int) -> str:
    return "1 action" if number == 1 else f"{number} actions"
