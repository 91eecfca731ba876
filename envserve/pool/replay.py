"""Replay a repro file in a worker process, and compare the end with the recorded one.

The env is built from the worker's registry. The file contains no code.
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
from envserve.regular_file import open_regular
from envserve.slab import Status
from envserve.spaces import codec
from envserve.text import counted, exception_line, one_line
from envserve.worker.channel import (
    MAX_MESSAGE_BYTES,
    ChannelMessage,
    MessageKind,
    pack_message,
)

OnFrame = Callable[[float, Any], None]

#: Timeout for building the env.
_BUILD_SECONDS: Final = 300.0
#: Timeout for the exit of a process that has closed its socket.
_EXIT_SECONDS: Final = 10.0
#: Maximum time of a single wait, because `poll` rejects very long ones.
_MAX_WAIT_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
      is_reproduced: Whether the same fault occurred in the same action.
      text: Description of how the replay ended.
    """

    is_reproduced: bool
    text: str


def load_repro(path: Path) -> Repro:
    """Read a repro file.

    Raises:
      ReproError: The file cannot be read or is not valid.
    """
    try:
        with open_regular(path) as file:
            return decode_repro(file.read(MAX_REPRO_BYTES + 1))
    except OSError as error:
        raise ReproError(
            f"{path}: cannot read the repro file: {error.strerror}; the log line of "
            f"the crash names its repro file"
        ) from None
    except ReproError as error:
        raise ReproError(f"{path}: {error}") from None


def describe_repro(repro: Repro) -> str:
    """Describe a repro file in a few lines, with reasons why a replay may differ."""
    played = repro.played
    start, caveats = "a reset with unknown random numbers", []
    if played.num_missing:
        actions = counted(played.num_missing, "action")
        caveats.append(f"{actions} before these are not recorded")
    if played.seed is not None:
        start = f"a reset with seed {played.seed}"
    elif played.generator is not None:
        start = "a reset with the recorded state of the env's generator"
    else:
        caveats.append("its random numbers are not recorded")
    if played.misses_options:
        caveats.append("options of this reset or an earlier one are not recorded")
    if played.is_touched:
        caveats.append("method calls and attribute assignments are not recorded")
    env = f"env {repro.env_index} of {one_line(repro.env_name)}"
    if repro.wrappers:
        env += f" in {one_line(', '.join(map(str, repro.wrappers)))}"
    # The file may come from someone else, so its text is escaped for the terminal.
    cause = one_line(exception_line(repro.end.text))
    lines = [
        f"{env}, incarnation {played.incarnation}",
        f"{start}, then {counted(len(played.actions[0]), 'action')}",
        f"ended with {repro.end.status.name}: {cause}",
    ]
    if caveats:
        lines.append(f"The replay may end differently: {'; '.join(caveats)}.")
    return "\n".join(lines)


def replay(
    repro: Repro,
    launcher: Launcher,
    timeout_seconds: float | None = None,
    on_frame: OnFrame | None = None,
    num_frames: int = 0,
) -> ReplayResult:
    """Build the env in a new process, and apply the recorded actions.

    Args:
      repro: The content of a repro file.
      launcher: Starts the process. The launcher must have imported the modules that
        register the env.
      timeout_seconds: Time after which a step or reset is considered hung; the recorded
        timeout by default.
      on_frame: Called with the frame rate and the rendered frame before each of the
        last `num_frames` actions.
      num_frames: Number of frames to render.
    """
    if timeout_seconds is None:
        timeout_seconds = repro.timeout_seconds
    process = launcher.launch()
    with contextlib.closing(process.channel):
        if on_frame:
            kwargs = {**repro.env_kwargs, "render_mode": "rgb_array"}
            repro = replace(repro, env_kwargs=kwargs)
        payload = encode_repro(repro)
        num_frames = num_frames if on_frame else 0
        process.channel.send(pack_message(MessageKind.REPLAY, 0, num_frames, payload))
        try:
            return _receive_result(repro, process, timeout_seconds, on_frame)
        finally:
            process.kill("it is done", time.monotonic())


def _receive_result(
    repro: Repro,
    process: WorkerProcess,
    timeout_seconds: float,
    on_frame: OnFrame | None,
) -> ReplayResult:
    action_number: int | None = None  # 0 for the reset, None before it
    for message in _receive_messages(process, timeout_seconds):
        if not isinstance(message, ChannelMessage):
            end = End(status=Status.TIMEOUT, text=f"hung for {message:g} s")
            return _compare(repro, action_number, end)
        if message.kind is MessageKind.DONE:
            action_number = message.sequence
        elif message.kind is MessageKind.VIDEO_FRAME:
            if on_frame:
                on_frame(*codec.decode(message.payload, max_bytes=MAX_MESSAGE_BYTES))
        elif message.kind is MessageKind.READY:
            text = f"did not crash in {counted(len(repro.played.actions[0]), 'action')}"
            if repro.end.status is Status.OK:  # a flight record, without a fault
                return ReplayResult(True, f"to its end: {text}")
            return ReplayResult(False, text)
        elif message.kind is MessageKind.FAILED and message.block:
            failure = codec.decode(message.payload)
            return _compare(
                repro, action_number, End(status=Status.ENV_ERROR, **failure)
            )
        else:
            text = message.payload.decode(errors="replace").strip()
            hint = ", ".join(map(one_line, repro.import_modules))
            if hint:
                text += f"\nThe file was written in a process that imported {hint}."
            return ReplayResult(False, f"could not be replayed: {text}")
    exit_ = process.wait_exit(_EXIT_SECONDS)
    if exit_ is None:
        raise ReproError(
            f"expected {process!r} to exit; it has closed its socket, but is running"
        )
    text = "\n".join(filter(None, [str(exit_), exit_.stderr_excerpt]))
    end = End(status=Status.WORKER_DIED, text=text, exit_code=exit_.exit_code)
    return _compare(repro, action_number, end)


def _receive_messages(
    process: WorkerProcess, timeout_seconds: float
) -> Iterator[ChannelMessage | float]:
    """Yield the worker's messages; if it hangs, yield the timeout in seconds."""
    limit = _BUILD_SECONDS
    deadline = time.monotonic() + limit
    while not process.channel.is_at_eof:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            yield limit
            return
        process.channel.wait(min(remaining, _MAX_WAIT_SECONDS))
        for message in process.channel.read():
            if message.kind is MessageKind.BUILT:
                limit = timeout_seconds
            else:
                yield message
            deadline = time.monotonic() + limit


def _compare(repro: Repro, action_number: int | None, actual: End) -> ReplayResult:
    """Return the result of a replay: whether it ended as recorded, and how."""
    where = "before the reset"
    if action_number is not None:
        where = f"in action {action_number}" if action_number else "in the reset"
    # A worker whose env is invalid in its first reset reports this and exits.
    text = actual.text.strip()
    is_same_end = _signature(actual) == _signature(repro.end) or (
        text != "" and repro.end.text.endswith(text)
    )
    is_same = action_number == len(repro.played.actions[0]) and is_same_end
    return ReplayResult(is_same, f"{where}: {text}")


def _signature(end: End) -> tuple[object, ...]:
    """Return the properties in which the recorded and the replayed end must agree."""
    if end.status is Status.WORKER_DIED:
        return end.status, end.exit_code
    if end.status is Status.ENV_ERROR and not end.is_violation:
        # The line begins with the class of the exception.
        return end.status, exception_line(end.text).partition(":")[0]
    return end.status, end.is_violation
