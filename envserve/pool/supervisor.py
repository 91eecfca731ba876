"""One worker over all its processes: started, watched, killed, started again.

Calls go down, and what has happened comes back as events. What becomes of the blocks
is the pool's business.
"""

from __future__ import annotations

import logging
import math
import selectors
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from envserve.errors import EnvserveError, EnvStartError, WorkerError
from envserve.lane import Block
from envserve.pool.launcher import KILL_SECONDS, Launcher, WorkerProcess
from envserve.pool.worker_states import MOVES, Event, Exit, Lost, Ready, WorkerState
from envserve.settings import EnvRequest, PoolSettings
from envserve.slab import Slab, Status
from envserve.spaces import codec
from envserve.worker.channel import REFUSALS, ChannelMessage, Kind, pack_message
from envserve.worker.worker_report import read_spaces
from envserve.wrappers.specs import plain_wrappers

__all__ = ["SupervisedWorker"]

_LOGGER: Final = logging.getLogger(__name__)

#: How often heartbeats of busy workers are looked at; bounds how late a hang is seen.
_WATCH_SECONDS: Final = 0.1
#: How soon to ask again for the exit status of a process that has just ended.
_EXIT_STATUS_SECONDS: Final = 0.002
_FIRST_BACKOFF_SECONDS: Final = 0.1
#: Least from one start to the next of a worker that has not stepped in between.
_START_SECONDS: Final = 0.1
_MAX_BACKOFF_SECONDS: Final = 30.0
#: What a worker needs to know, as far as it is plain.
_SETTINGS: Final = (*(field.name for field in fields(EnvRequest)), "max_infos_kib")


class _Restarts:
    """When to start the next process.

    Attributes:
      num_failures: Ends at work in a row, without a step in between.
      started_at: When the last one was started.
      next_at: The earliest instant.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        self.next_at = self.started_at = -math.inf

    def plan(self, is_failure: bool, has_stepped: bool, now: float) -> None:
        if has_stepped:
            self.num_failures = 0
        self.num_failures += is_failure
        self.next_at = now
        if self.num_failures > 1:
            delay = _FIRST_BACKOFF_SECONDS * 2.0 ** (self.num_failures - 2)
            self.next_at += min(delay, _MAX_BACKOFF_SECONDS)
        if not has_stepped:
            self.next_at = max(self.next_at, self.started_at + _START_SECONDS)


class SupervisedWorker:
    """Keeps one worker's envs alive.

    Attributes:
      label: Name for messages: which worker, which envs.
      index: Which of the pool's workers it is.
      blocks: The blocks that it hosts.
      state: See `WorkerState`.
      error: Why it was given up, once it is ENDED for that.
      process: The running process, or None.
      exit: How the last process has ended; None if that is not known.
      is_ending: Whether the process has ended, but its exit status is not known yet.
      num_unanswered: Operations that were sent to the process, and not answered.
      has_stepped: Whether a step has succeeded since the start; the pool says so.
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
        """Only stores; `start` begins."""
        first = config.first_env_index
        ranges = [f"{first + b.start} to {first + b.stop - 1}" for b in blocks]
        self.label = f"worker {index} (of envs {', '.join(ranges)})"
        self.index = index
        self.blocks = blocks
        self.state = WorkerState.BACKOFF
        self.error: EnvserveError | None = None
        self.process: WorkerProcess | None = None
        self.exit: Exit | None = None
        self.is_ending = False
        self.num_unanswered = 0
        self.has_stepped = False
        self._num_workers = num_workers
        self._config = config
        self._launcher = launcher
        self._selector = selector
        self._slab: Slab | None = None
        self._restarts = _Restarts()
        self._is_built = False  # since the start
        self._traceback, self._is_hopeless = "", False  # by a FAILED message
        self._kill_status = Status.WORKER_DIED
        self._close_by = math.inf
        self._beat, self._beat_at = [0, 0], 0.0

    @property
    def excerpt_note(self) -> str:
        """What the last process has written to stderr, to be added to a message."""
        excerpt = "" if self.exit is None else self.exit.excerpt
        return f"; its stderr ends:\n{excerpt}" if excerpt else ""

    def _move(self, state: WorkerState) -> None:
        if state not in MOVES[self.state]:
            raise AssertionError(f"{self!r} cannot become {state.name}")
        self.state = state
        if state is WorkerState.ENDED:
            self._slab = None

    # What the pool asks for.

    def start(self, incarnations: Sequence[int], now: float) -> list[Event]:
        """Starts a process that builds the envs, if one is due."""
        if self.state is not WorkerState.BACKOFF or now < self._restarts.next_at:
            return []
        self._move(WorkerState.STARTING)
        self._restarts.started_at = self._beat_at = now
        self._traceback, self._kill_status = "", Status.WORKER_DIED
        self.has_stepped = self._is_built = False
        self.exit = None
        try:
            self.process = self._launcher.launch(self._selector, self)
        except WorkerError as error:
            return self._on_end(f"could not be started: {error}", "", now)
        message = self._build_message(incarnations)
        self.process.channel.send(pack_message(Kind.BUILD, payload=message))
        if self._slab is not None:
            self.attach(self._slab)
        return []

    def _build_message(self, incarnations: Sequence[int]) -> bytes:
        """Returns what a process is told to build."""
        config = self._config
        message: dict[str, Any] = {
            **{name: getattr(config, name) for name in _SETTINGS},
            "env_kwargs": dict(config.env_kwargs),
            "wrappers": plain_wrappers(config.wrappers),
            "num_workers": self._num_workers,
            "worker": self.index,
            "blocks": [[block.index, block.start, block.stop] for block in self.blocks],
            "incarnations": [*incarnations],
        }
        return codec.encode(message)

    def attach(self, slab: Slab) -> None:
        """Passes the slab to this process and all that follow it."""
        self._slab = slab
        if self.process is not None:
            self.process.channel.send(pack_message(Kind.SLAB), slab.fd)

    def send(self, data: bytes, count: int, now: float) -> None:
        """Sends so many operations to a worker that is SERVING."""
        assert self.process is not None, "a worker that serves has one"
        self.num_unanswered += count
        self._beat_at = now
        self.process.channel.send(data)

    def fail(
        self, reason: str, now: float, status: Status = Status.WORKER_DIED
    ) -> None:
        """Kills a process that misbehaves; says why when it has ended."""
        if self.process is not None and self.state is not WorkerState.KILLED:
            self._move(WorkerState.KILLED)
            self._kill_status = status
            self.process.kill(reason, now, has_stack=status is Status.TIMEOUT)

    def begin_close(self, kill_at: float) -> None:
        """Asks the process to end; it is killed if it has not by `kill_at`."""
        was_asked = self._close_by < math.inf
        self._close_by = min(self._close_by, kill_at)
        if self.process is None:
            self.drop()
        elif not was_asked and self.state is not WorkerState.KILLED:
            self._move(WorkerState.CLOSING)
            self.process.channel.send(pack_message(Kind.CLOSE))

    def end(self, reason: str, now: float) -> None:
        """Kills the process and waits until it has ended; there will be no other.

        An interrupt may have left the worker in any state.
        """
        if self.process is not None:
            self.process.kill(reason, now)
            if self.process.wait_exit(KILL_SECONDS) is None:
                self._give_up_killed(self.process)
        self.drop()

    def drop(self) -> None:
        """Forgets the process, whatever it does."""
        self._release()
        if self.state is not WorkerState.ENDED:
            self._move(WorkerState.ENDED)

    # What happens.

    def read(self, now: float) -> Sequence[Event]:
        """Returns what the process has sent, and its end; sends what is left to."""
        if (process := self.process) is None:
            return ()
        try:
            messages = process.channel.read()
        except WorkerError as error:
            self.fail(f"sent what is no message: {error}", now)
            messages = []
        events: list[Event] = []
        for message in messages:
            self._beat_at = now
            if message.kind is Kind.DONE and self.state is WorkerState.SERVING:
                self.num_unanswered -= 1
                events.append(message)
            elif self.state is WorkerState.STARTING:
                events += self._on_start_message(message, now)
            # What was killed was hung, and the signal that has it write its stack may
            # have woken it from a system call with a wrong result.
            elif self.state is WorkerState.SERVING:
                self._on_odd_message(message, now)
        is_at_end = process.channel.is_at_end
        if is_at_end or self.state is WorkerState.KILLED:
            self.is_ending = is_at_end
            events += self._check_end(process, now)
        return events

    def watch(self, now: float) -> list[Event]:
        """Looks for a process that hangs, has ended, or has not closed in time."""
        if self.process is None:
            return []
        events = self._check_end(self.process, now)
        if self.process is None:
            return events
        if now >= self._close_by:
            self.fail("did not end when asked to", now)
        elif self.state is WorkerState.STARTING:
            limit = self._config.reset_timeout_seconds
            if now - self._beat_at > limit:
                self.fail(f"took longer than {limit:g} s to build an env", now)
        elif self.num_unanswered and self._slab is not None:
            self._check_heartbeat(self._slab, now)
        return []

    def next_watch(self, now: float) -> float:
        """Returns when to `watch` and `start` it, unless something happens before."""
        if self.is_ending:
            return now + _EXIT_STATUS_SECONDS
        if self.state is WorkerState.BACKOFF:
            return max(now, self._restarts.next_at)
        is_at_rest = self.state is WorkerState.SERVING and not self.num_unanswered
        if is_at_rest or self.state is WorkerState.ENDED:
            return math.inf
        return now + _WATCH_SECONDS

    def _on_start_message(self, message: ChannelMessage, now: float) -> list[Event]:
        if message.kind is Kind.READY:
            try:
                spec = read_spaces(message.payload, self._config.env_name)
            except ValueError as error:
                # Said at once: the next process would send the same.
                self._traceback = f"It sent spaces that cannot be read: {error}"
                self.fail("sent spaces that cannot be read", now)
                return []
            self._move(WorkerState.SERVING)
            self._is_built = True
            return [Ready(spec)]
        if message.kind in REFUSALS:
            self.error = REFUSALS[message.kind](
                message.payload.decode(errors="replace")
            )
        elif message.kind is not Kind.BUILT:
            self._on_odd_message(message, now)
        return []

    def _on_odd_message(self, message: ChannelMessage, now: float) -> None:
        if message.kind is Kind.FAILED:
            self._traceback = message.payload.decode(errors="replace")
            self._is_hopeless = message.block == 1
        else:
            self.fail(f"sent {message.kind.name} when it should not", now)

    def _check_heartbeat(self, slab: Slab, now: float) -> None:
        beat = slab.heartbeats[self.index, :2].tolist()
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
            return
        what, limit = "step", self._config.step_timeout_seconds
        if beat[1]:
            what, limit = "reset or call", self._config.reset_timeout_seconds
        if now - self._beat_at > limit:
            self.fail(
                f"a {what} timed out after {limit:g} s; "
                f"raise {(word := what.split()[0])}_timeout (a server's "
                f"--{word}-timeout) if the env may take that long",
                now,
                Status.TIMEOUT,
            )

    # The end of a process.

    def _check_end(self, process: WorkerProcess, now: float) -> list[Event]:
        """Acts on the end of the process, once its exit status is known."""
        if process.has_ended(now):
            self._release()
            return self._on_end(str(process.exit), process.killed_for, now)
        if process.channel.is_at_end and process.is_overdue(now):
            # It may go on, and write to rows that are its successor's by then.
            self.fail("closed its socket without ending", now)
        if process.cannot_be_killed(now):
            end = self._give_up_killed(process)
            self._release()
            return self._on_end(end, process.killed_for, now)
        return []

    def _give_up_killed(self, process: WorkerProcess) -> str:
        """Gives the worker up, since its process does not end; returns what to say."""
        end = f"was killed, but has not ended within {KILL_SECONDS:g} s"
        self.error = WorkerError(
            f"{self.label} {process.killed_for}; its process {process.pid} {end}, and "
            f"may still write to its rows; end that process and start the pool anew"
        )
        return end

    def _release(self) -> None:
        """Lets go of the process."""
        process, self.process = self.process, None
        if process is not None:
            self.exit = process.exit
            process.channel.close()
        self.is_ending = False

    def _on_end(self, end: str, killed_for: str, now: float) -> list[Event]:
        """Says how a process has ended, and plans the next one."""
        if self._close_by < math.inf:
            self._move(WorkerState.ENDED)
            return []
        # Who dies while it has nothing to do has not failed to get anything running:
        # something else has killed it, however often that is between two steps.
        is_failure = bool(killed_for or self.num_unanswered) or not self._is_built
        self._restarts.plan(is_failure, self.has_stepped, now)
        self.num_unanswered = 0
        text = f"{killed_for}; it {end}" if killed_for else end
        if self._traceback:
            text = f"stopped:\n{self._traceback.rstrip()}"
        tries = self._restarts.num_failures
        is_hopeless = self._is_hopeless or (self._slab is None and self._traceback)
        if not self.error and (tries > self._config.max_restarts or is_hopeless):
            self.error = EnvStartError(
                f"{self.label} failed"
                + ("" if tries == 1 else f" {tries} times in a row")
                + f" to get its {self._config.env_name} running"
                + ("" if self._traceback else f": it {text}{self.excerpt_note}"),
                remote_traceback=self._traceback,
            )
        self._move(WorkerState.ENDED if self.error else WorkerState.BACKOFF)
        if self.error is None and self._slab is None:
            # Else the pool says it, or who waits for the pool is told.
            _LOGGER.warning("%s %s%s", self.label, text, self.excerpt_note)
        return [Lost(self._kill_status, text)]

    def __repr__(self) -> str:
        return f"<{self.label}, {self.state.name}, {self.process!r}>"
