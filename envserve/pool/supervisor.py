"""Supervise one worker across process restarts: start, watch, kill and restart it.

The pool calls the methods of a `SupervisedWorker`, which return events
(`worker_states.Event`). Only `kill_and_wait` blocks. `block_operations` handles the
consequences that a loss has for the blocks.
"""

from __future__ import annotations

import math
import selectors
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from envserve.errors import EnvserveError, EnvStartError, WorkerError
from envserve.lane import Block
from envserve.pool.launcher import KILL_SECONDS, Launcher, WorkerProcess
from envserve.pool.worker_states import (
    TRANSITIONS,
    Event,
    Exit,
    Lost,
    Ready,
    WorkerState,
)
from envserve.settings import EnvRequest, PoolSettings
from envserve.slab import FIRST_STEP, Slab, Status
from envserve.spaces import codec
from envserve.text import one_line
from envserve.worker.channel import (
    REQUEST_ERRORS,
    ChannelMessage,
    MessageKind,
    pack_message,
)
from envserve.worker.worker_report import decode_spaces
from envserve.wrappers.specs import wrappers_to_plain

#: Limits of the time between heartbeat checks of a busy worker.
_MIN_WATCH_SECONDS: Final = 0.01
_MAX_WATCH_SECONDS: Final = 0.1
#: Polling interval for the exit status of a process that has just ended.
_EXIT_STATUS_SECONDS: Final = 0.002
#: Delay of a restart after the second consecutive failure. Each further failure doubles
#: the delay, up to `_MAX_BACKOFF_SECONDS`.
_FIRST_BACKOFF_SECONDS: Final = 0.05
_MAX_BACKOFF_SECONDS: Final = 30.0
#: Maximum number of consecutive processes that a host without free resources could not
#: start; with these delays, the worker fails after about two minutes.
_MAX_UNSTARTED: Final = 14
#: Minimum time between two starts if the worker has completed no step in between.
_MIN_START_INTERVAL_SECONDS: Final = 0.1
#: Maximum time to close a process that first has to finish an operation or its start.
_BUSY_CLOSE_SECONDS: Final = 1.0
#: Names of the settings that are sent to the worker unchanged.
_SETTINGS: Final = (
    *(field.name for field in fields(EnvRequest)),
    *("max_infos_kib", "pickled_code"),
)


def watch_seconds(config: PoolSettings) -> float:
    """Return the seconds between heartbeat checks of a busy worker.

    A hang is detected at most two of these intervals after its timeout, because a check
    also notices that a step has begun.
    """
    seconds = config.step_timeout_seconds / 10.0
    return min(max(seconds, _MIN_WATCH_SECONDS), _MAX_WATCH_SECONDS)


class _RestartSchedule:
    """Determines when the next process may be started.

    Attributes:
      num_failures: Number of failures since the last successful step.
      num_unstarted: Number of consecutive processes that the host could not start.
      started_at: Time of the last start.
      next_at: Earliest time of the next start.
    """

    def __init__(self) -> None:
        self.num_failures = self.num_unstarted = 0
        self.next_at = self.started_at = -math.inf

    @property
    def num_tries(self) -> int:
        return self.num_failures + self.num_unstarted

    def plan(
        self, is_failure: bool, is_unstarted: bool, has_stepped: bool, now: float
    ) -> None:
        """Schedule the next start, after a process has ended or was not started."""
        if has_stepped:
            self.num_failures = 0
        self.num_failures += is_failure
        self.num_unstarted = self.num_unstarted + 1 if is_unstarted else 0
        self.next_at = now
        if self.num_tries > 1:
            delay = _FIRST_BACKOFF_SECONDS * 2.0 ** (self.num_tries - 2)
            self.next_at += min(delay, _MAX_BACKOFF_SECONDS)
        if not has_stepped:
            self.next_at = max(
                self.next_at, self.started_at + _MIN_START_INTERVAL_SECONDS
            )


class SupervisedWorker:
    """A worker that is restarted whenever its process ends.

    Attributes:
      label: Name for messages, with the worker's index and env indices.
      index: Index of the worker in the pool.
      blocks: The blocks that the worker hosts.
      state: See `WorkerState`.
      error: Reason for not restarting the worker; None unless it has failed.
      process: The current process, or None.
      exit: Exit of the last process; None if it is unknown.
      is_ending: Whether the process has closed its socket, but its exit status is not
        known yet.
      num_unanswered: Number of operations that were sent to the process but not
        answered yet.
      has_stepped: Whether the process has completed a step; set by the pool.
      was_slow_to_close: Whether the process was killed because `close` of its envs took
        too long.
      was_replaced: Whether `replace` has ended the last process. If so, the env that
        was running then is not at fault.
    """

    def __init__(
        self,
        index: int,
        blocks: tuple[Block, ...],
        num_workers: int,
        config: PoolSettings,
        launcher: Launcher,
        selector: selectors.BaseSelector,
    ) -> None:
        """Store the arguments; `start` starts the first process."""
        first = config.first_env_index
        ranges = ", ".join(
            f"{first + b.start}" + f" to {first + b.stop - 1}" * (len(b.rows) > 1)
            for b in blocks
        )
        self.label = f"worker {index} (env{'s' * (not ranges.isdigit())} {ranges})"
        self.index = index
        self.blocks = blocks
        self.state = WorkerState.BACKOFF
        self.error: EnvserveError | None = None
        self.process: WorkerProcess | None = None
        self.exit: Exit | None = None
        self.is_ending = False
        self.num_unanswered = 0
        self.has_stepped = self.was_replaced = self.was_slow_to_close = False
        self._num_workers = num_workers
        self._config = config
        self._launcher = launcher
        self._selector = selector
        self._slab: Slab | None = None
        self._restarts = _RestartSchedule()
        self._is_built = False  # whether this process has built its envs
        self._importing = ""  # the module that this process is importing
        self._has_ever_stepped = False  # whether any process has completed a step
        self._traceback, self._is_permanent = "", False  # from the FAILED message
        self._kill_status = Status.WORKER_DIED
        self._close_deadline = self._busy_close_deadline = math.inf
        self._beat, self._beat_at, self._watched_at = [0, 0], 0.0, 0.0

    @property
    def stderr_note(self) -> str:
        """The end of the last process's stderr, for appending to a message."""
        excerpt = "" if self.exit is None else self.exit.stderr_excerpt
        # Logs of a lease's end contain only the first line of a message.
        return f"\nThe end of its stderr:\n{excerpt}" if excerpt else ""

    def _set_state(self, state: WorkerState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} cannot change to {state.name}")
        self.state = state
        if state is WorkerState.ENDED:
            self._slab = None

    # Commands of the pool.

    def start(self, incarnations: Sequence[int], now: float) -> list[Event]:
        """Start a process if a start is due; return a `Lost` event if this fails."""
        if self.state is not WorkerState.BACKOFF or now < self._restarts.next_at:
            return []
        self._set_state(WorkerState.STARTING)
        self._restarts.started_at = self._beat_at = now
        self._traceback, self._kill_status = "", Status.WORKER_DIED
        self.has_stepped = self.was_replaced = self._is_built = False
        self._importing = ""
        self.exit = None
        try:
            self.process = self._launcher.launch(self._selector, self)
        except WorkerError as error:
            self.exit = Exit(0, 1, str(error), lacks_resources=True)
            return self._on_exit(str(self.exit), "", now)
        message = self._build_message(incarnations)
        self.process.channel.send(pack_message(MessageKind.BUILD, payload=message))
        if self._slab is not None:
            self.attach(self._slab)
        return []

    def _build_message(self, incarnations: Sequence[int]) -> bytes:
        """Encode the payload of a BUILD message."""
        config = self._config
        gpus = config.gpus or ("",)
        message: dict[str, Any] = {
            **{name: getattr(config, name) for name in _SETTINGS},
            "wrappers": wrappers_to_plain(config.wrappers),
            "num_workers": self._num_workers,
            "worker": self.index,
            "gpu": str(gpus[self.index % len(gpus)]),
            "blocks": [[block.index, block.start, block.stop] for block in self.blocks],
            "incarnations": [*incarnations],
        }
        return codec.encode(message, keep_types=True)

    def attach(self, slab: Slab) -> None:
        """Pass the slab to the current process and all later processes."""
        self._slab = slab
        if self.process is not None:
            self.process.channel.send(pack_message(MessageKind.SLAB), slab.fd)

    def send(self, data: bytes, count: int, now: float) -> None:
        """Send `data`, `count` encoded operations; the worker must be SERVING."""
        assert self.process is not None, "a SERVING worker has a process"
        self.num_unanswered += count
        self._beat_at = now
        self.process.channel.send(data)

    def kill(
        self, reason: str, now: float, status: Status = Status.WORKER_DIED
    ) -> None:
        """Kill the process; the `Lost` event contains the reason."""
        if self.process is not None and self.state is not WorkerState.KILLED:
            self._set_state(WorkerState.KILLED)
            self._kill_status = status
            self.process.kill(reason, now, wants_stack=status is Status.TIMEOUT)

    def replace(self, reason: str, now: float) -> None:
        """Kill the process for an earlier fault; a new process replaces it."""
        self.was_replaced = True
        self.kill(f"was replaced because {reason}", now)

    def begin_close(self, grace_seconds: float, now: float) -> None:
        """Ask the process to exit; kill it if it is still running after this time.

        A process that has not begun to close its envs after 1 s is killed then.
        """
        is_repeated = self._close_deadline < math.inf
        self._close_deadline = min(self._close_deadline, now + grace_seconds)
        if not (is_repeated or self._is_idle):
            self._busy_close_deadline = now + _BUSY_CLOSE_SECONDS
        if self.process is None:
            self.abandon()
        elif not is_repeated and self.state is not WorkerState.KILLED:
            self._set_state(WorkerState.CLOSING)
            self.process.channel.send(pack_message(MessageKind.CLOSE))

    @property
    def _is_idle(self) -> bool:
        return self.state is WorkerState.SERVING and not self.num_unanswered

    @property
    def kill_at(self) -> float:
        """Time at which a closing process is killed; infinity before `begin_close`."""
        return min(self._close_deadline, self._busy_close_deadline)

    def kill_and_wait(self, reason: str, now: float) -> None:
        """Kill the process, wait until it has ended, and do not restart it.

        Allowed in any state, because an interrupted call may leave the worker in any
        state.
        """
        if (process := self.process) is not None:
            process.kill(reason, now)
            # A process without an id is not forked yet. The template kills it after
            # forking it, before the next fork, so there is no need to wait.
            if process.pid is not None and process.wait_exit(KILL_SECONDS) is None:
                self._abandon_unkillable(process)
        self.abandon()

    def abandon(self) -> None:
        """End the worker without waiting for its process to exit."""
        self._release()
        if self.state is not WorkerState.ENDED:
            self._set_state(WorkerState.ENDED)

    # Events of the process.

    def read(self, now: float) -> Sequence[Event]:
        """Return the events of the process; send queued messages."""
        if (process := self.process) is None:
            return ()
        try:
            messages = process.channel.read()
        except WorkerError as error:
            self.kill(f"sent an invalid message: {error}", now)
            messages = []
        events: list[Event] = []
        for message in messages:
            self._beat_at = now
            if message.kind is MessageKind.DONE and self.state is WorkerState.SERVING:
                self.num_unanswered -= 1
                events.append(message)
            elif self.state is WorkerState.STARTING:
                events += self._on_start_message(message, now)
            # Messages of a KILLED process are ignored: the signal that makes it write
            # its stack may interrupt a system call of the env and falsify the result.
            elif self.state is WorkerState.SERVING:
                self._on_unexpected_message(message, now)
            elif self.state is WorkerState.CLOSING and message.kind is MessageKind.DONE:
                self.num_unanswered -= 1
                if not self.num_unanswered:  # the process closes its envs now
                    self._busy_close_deadline = math.inf
        is_at_end = process.channel.is_at_eof
        if is_at_end or self.state is WorkerState.KILLED:
            self.is_ending = is_at_end
            events += self._check_exit(process, now)
        return events

    def watch(self, now: float) -> list[Event]:
        """Kill a process that hangs; return a `Lost` event if the process has ended."""
        if self.process is None:
            return []
        events = self._check_exit(self.process, now)
        if self.process is None:
            return events
        if now >= self.kill_at:
            self.was_slow_to_close |= self._busy_close_deadline == math.inf
            self.kill("did not exit when it was asked to", now)
        elif self.state is WorkerState.STARTING:
            limit = self._config.reset_timeout_seconds
            if self.process.pid is None:
                # The template may still import modules; the launcher limits this time.
                self._beat_at = now
            elif self._silent_seconds(now, limit) > limit:
                work = (
                    f"import {self._importing}" if self._importing else "build an env"
                )
                self.kill(f"took longer than {limit:g} s to {work}", now)
        elif self.num_unanswered and self._slab is not None:
            self._check_heartbeat(self._slab, now)
        return []

    def next_watch(self, now: float) -> float:
        """Return the latest time at which to call `watch` and `start`, or infinity."""
        if self.is_ending:
            return now + _EXIT_STATUS_SECONDS
        if self.state is WorkerState.BACKOFF:
            return max(now, self._restarts.next_at)
        if self._is_idle or self.state is WorkerState.ENDED:
            return math.inf
        return now + watch_seconds(self._config)

    def _on_start_message(self, message: ChannelMessage, now: float) -> list[Event]:
        if message.kind is MessageKind.READY:
            try:
                spec = decode_spaces(message.payload, self._config.env_name)
            except ValueError as error:
                # A restart would have the same result, so fail immediately.
                self._traceback = f"It sent spaces that cannot be read: {error}"
                self.kill("sent spaces that cannot be read", now)
                return []
            self._set_state(WorkerState.SERVING)
            self._is_built = True
            return [Ready(spec)]
        if message.kind in REQUEST_ERRORS:
            self.error = REQUEST_ERRORS[message.kind](
                message.payload.decode(errors="replace")
            )
        elif message.kind is MessageKind.IMPORTING:
            self._importing = one_line(message.payload.decode(errors="replace"))
        elif message.kind is not MessageKind.BUILT:
            self._on_unexpected_message(message, now)
        return []

    def _on_unexpected_message(self, message: ChannelMessage, now: float) -> None:
        if message.kind is MessageKind.FAILED:
            self._traceback = message.payload.decode(errors="replace")
            self._is_permanent = message.block == 1
        else:
            self.kill(f"sent an unexpected {message.kind.name}", now)

    def _check_heartbeat(self, slab: Slab, now: float) -> None:
        beat = slab.heartbeats[self.index, :2].tolist()
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
            return
        name, option, limit = "step", "step", self._config.step_timeout_seconds
        is_first = beat[1] == FIRST_STEP
        # A first step may compile code, so it may take as long as a reset. If an import
        # has started threads, the limit of other steps applies: a first step that hangs
        # probably waits for one of these threads, which a forked worker does not have.
        if beat[1] and not (is_first and self._launcher.import_note):
            name, option = "first step" if is_first else "reset or call", "reset"
            reset_limit = self._config.reset_timeout_seconds
            limit = max(limit, reset_limit) if is_first else reset_limit
        if self._silent_seconds(now, limit) > limit:
            self.kill(
                f"hung: a {name} timed out after {limit:g} s; raise {option}_timeout "
                f"(on a server, --{option}-timeout) if the env may take longer",
                now,
                Status.TIMEOUT,
            )

    def _silent_seconds(self, now: float, limit: float) -> float:
        """Return the seconds since the last sign of life, for comparison with `limit`.

        If the worker was suspended together with this process (`docker pause`, for
        example), it could not work. A pause between two calls therefore counts as at
        most half of the limit. It counts at all because the worker may have continued.
        """
        pause = now - max(self._beat_at, self._watched_at)
        self._beat_at += max(0.0, pause - limit / 2)
        self._watched_at = now
        return now - self._beat_at

    # The exit of the process.

    def _check_exit(self, process: WorkerProcess, now: float) -> list[Event]:
        """Return a `Lost` event once the process has ended; kill it if it hangs."""
        if process.has_ended(now):
            self._release()
            return self._on_exit(str(process.exit), process.kill_reason, now)
        if process.channel.is_at_eof and process.is_overdue(now):
            # If it is not killed, it might write to rows that its successor uses.
            self.kill("closed its socket without exiting", now)
        if process.cannot_be_killed(now):
            end = self._abandon_unkillable(process)
            self._release()
            return self._on_exit(end, process.kill_reason, now)
        return []

    def _abandon_unkillable(self, process: WorkerProcess) -> str:
        """Record an error for a process that cannot be killed; return how it ended."""
        end = f"was killed, but did not exit within {KILL_SECONDS:g} s"
        self.error = WorkerError(
            f"{self.label} {process.kill_reason}; its process {process.pid} {end}, and "
            f"may still write to its rows; end that process and restart the pool"
        )
        return end

    def _release(self) -> None:
        """Close the channel to the process, and set `process` to None."""
        process, self.process = self.process, None
        if process is not None:
            self.exit = process.exit
            process.channel.close()
        self.is_ending = False

    def _on_exit(self, end: str, kill_reason: str, now: float) -> list[Event]:
        """Schedule the next start or fail; return a `Lost` event, unless closing."""
        if self._close_deadline < math.inf:
            self._set_state(WorkerState.ENDED)
            return []
        # The death of an idle process does not count as a failure, however often it
        # happens, because the envs did not cause it.
        is_failure = bool(kill_reason or self.num_unanswered) or not self._is_built
        # The envs do not cause a lack of resources either. A pool that has never run
        # reports it as soon as any other failure.
        lacks_resources = self.exit is not None and self.exit.lacks_resources
        is_unstarted = lacks_resources and self._slab is not None
        is_failure &= not is_unstarted
        self._restarts.plan(is_failure, is_unstarted, self.has_stepped, now)
        self.num_unanswered = 0
        ends_in_import = False
        if (
            self.state is WorkerState.STARTING
            and self.exit
            and self.exit.ended_by_itself
        ):
            # An import that ended this process would end the next one, too. A
            # constructor, however, may succeed in the next process.
            ends_in_import = bool(self._importing)
            work = (
                f"imported {self._importing}" if self._importing else "built its envs"
            )
            end = self.exit.describe_while(work)
        note = self._launcher.import_note if is_failure else ""
        hint = f"; {note}" if note else ""
        text = f"{end}{hint}"
        if kill_reason:
            # A replaced process ends by this pool's signal, so omit how it ended.
            text = f"{kill_reason}{hint if self.was_replaced else f'; it {text}'}"
        if self._traceback:
            text = f"stopped{hint}:\n{self._traceback.rstrip()}"
        self._has_ever_stepped |= self.has_stepped
        is_permanent = (
            self._is_permanent
            or (self._slab is None and (self._traceback or ends_in_import))
            or self._launcher.ends_in_import
            # A first step that hangs probably waits for a thread that no forked process
            # has, so the next process would hang, too.
            or (note and kill_reason and not self._has_ever_stepped)
        )
        max_restarts = self._config.max_restarts
        has_failed_often = (
            self._restarts.num_failures > max_restarts
            or self._restarts.num_unstarted > max(max_restarts, _MAX_UNSTARTED)
        )
        if not self.error and (has_failed_often or is_permanent):
            self.error = self._start_error(text, kill_reason, hint)
        self._set_state(WorkerState.ENDED if self.error else WorkerState.BACKOFF)
        return [Lost(self._kill_status, text)]

    def _start_error(self, text: str, kill_reason: str, hint: str) -> EnvserveError:
        """Return the error for a worker that is not restarted; see `_on_exit`."""
        tries, details = self._restarts.num_tries, self._traceback
        # A message without a traceback is complete; do not add the worker's name.
        has_traceback = "Traceback (most recent call last)" in details
        if details and tries <= 1 and not (has_traceback or hint or kill_reason):
            return EnvStartError(details.rstrip())
        times = "" if tries == 1 else f" {tries} times in a row"
        failed = f"{self.label} failed{times} to run {self._config.env_name}"
        if self.exit and self.exit.lacks_resources:
            return WorkerError(f"{failed}: it {text}")
        reason = hint if details else f": it {text}{self.stderr_note}"
        return EnvStartError(f"{failed}{reason}", remote_traceback=details)

    def __repr__(self) -> str:
        return f"<{self.label}, {self.state.name}, {self.process!r}>"
