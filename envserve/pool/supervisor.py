"""One worker over all its processes: started, watched, killed, started again.

STARTING builds envs, SERVING answers, BACKOFF waits before the next start, ENDED is
for good. What happens to the blocks is the pool's business: it hears of every change.
"""

from __future__ import annotations

import enum
import logging
import math
import selectors
from collections.abc import Sequence
from typing import Final, Protocol

from envserve import codec
from envserve.channel import Frame, Kind, pack_frame
from envserve.errors import (
    EnvserveError,
    EnvStartError,
    SpaceError,
    UnknownEnv,
    WorkerError,
    WrapperError,
)
from envserve.lane import Block, PoolConfig
from envserve.pool.launcher import Exit, Launcher
from envserve.pool.worker_handle import WorkerHandle
from envserve.slab import Slab, Status
from envserve.spec import EnvSpec, restore

__all__ = ["SupervisedWorker", "WorkerListener", "WorkerState"]

_LOGGER: Final = logging.getLogger(__name__)

#: The exit status and the end of file come one after the other, or one does not come.
_EXIT_STATUS_GRACE_SECONDS: Final = 0.2
#: How long a process that was killed may take to end; the kernel may hold it.
_KILL_SECONDS: Final = 5.0
_FIRST_BACKOFF_SECONDS: Final = 0.1
#: Least from one start to the next of a worker that has not stepped in between.
_START_SECONDS: Final = 0.1
_MAX_BACKOFF_SECONDS: Final = 30.0
_MAX_SPACES_BYTES: Final = 64 << 20


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    BACKOFF = enum.auto()
    ENDED = enum.auto()


class WorkerListener(Protocol):
    """What a pool hears from its workers."""

    def on_ready(self, worker: SupervisedWorker, spec: EnvSpec) -> None:
        """All envs of the worker are built."""

    def on_done(self, worker: SupervisedWorker, frame: Frame) -> None:
        """A block's operation was answered."""

    def is_at_work(self, worker: SupervisedWorker) -> bool:
        """Tells whether the process has been asked for something, and not answered."""

    def on_lost(self, worker: SupervisedWorker, status: Status, text: str) -> None:
        """The process has ended unasked; another will follow, or the state is ENDED."""


class SupervisedWorker:
    """Keeps one worker's envs alive.

    Attributes:
      index: Which of the pool's workers it is.
      blocks: The blocks that it hosts.
      state: See `WorkerState`.
      error: Why it was given up, once it is ENDED for that.
      process: The running process, or None.
      exit: How the last process has ended; None if that is not known.
    """

    def __init__(
        self,
        index: int,
        blocks: tuple[Block, ...],
        num_workers: int,
        config: PoolConfig,
        launcher: Launcher,
        selector: selectors.BaseSelector,
        listener: WorkerListener,
    ) -> None:
        """Only stores; `start` begins."""
        self.index = index
        self.blocks = blocks
        self.state = WorkerState.BACKOFF
        self.error: EnvserveError | None = None
        self.process: WorkerHandle | None = None
        self.exit: Exit | None = None
        self._num_workers = num_workers
        self._config = config
        self._launcher = launcher
        self._selector = selector
        self._listener = listener
        self._slab: Slab | None = None
        self._failures = 0  # ends at work in a row without a step in between
        self._started_at = self._restart_at = -math.inf
        self._has_stepped = False  # since it was started
        self._kill_at = math.inf
        self._at_end_since = math.inf
        self._killed_at = math.inf
        self._traceback = ""  # of a FAILED frame
        self._hang = ""  # why we killed it
        self._hang_status = Status.WORKER_DIED
        self._beat: tuple[int, int] = (0, 0)
        self._beat_at = 0.0
        self._is_closing = False

    @property
    def label(self) -> str:
        """Name for messages: which worker, which envs."""
        offset = self._config.first_env_index
        ranges = (
            f"{block.start + offset} to {block.stop - 1 + offset}"
            for block in self.blocks
        )
        return f"worker {self.index} (of envs {', '.join(ranges)})"

    def start(self, incarnations: Sequence[int], now: float) -> None:
        """Starts a process that builds the envs."""
        self.state = WorkerState.STARTING
        self._started_at = now
        self._has_stepped = False
        self._at_end_since = self._killed_at = math.inf
        self._traceback = self._hang = ""
        self.exit = None
        self._beat_at = now
        try:
            self.process = WorkerHandle(self._launcher)
        except WorkerError as error:
            self._on_end(f"could not be started: {error}", now)
            return
        self._selector.register(self.process, selectors.EVENT_READ, self)
        self.process.build(
            self._config, self.index, self._num_workers, self.blocks, incarnations
        )
        if self._slab is not None:
            self.process.send_slab(self._slab)
        self._wait_for_room()

    def attach(self, slab: Slab) -> None:
        """Passes the slab to this process and all that follow it."""
        self._slab = slab
        if self.process is not None:
            self.process.send_slab(slab)
            self._wait_for_room()

    def send(self, data: bytes, now: float) -> None:
        """Sends operations to a worker that is SERVING."""
        if not data:  # no sign of life is to be expected of it
            return
        if self.process is not None:
            self.process.send(data)
            if self.process.has_unsent:
                self._wait_for_room()
        self._beat_at = now

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the process has read more."""
        return self.process is not None and self.process.has_unsent

    def wait(self, timeout_seconds: float) -> None:
        """Waits until `read` has something to handle."""
        if self.process is not None:
            self.process.wait(timeout_seconds)

    @property
    def is_ending(self) -> bool:
        """Whether its process has ended, but its exit status is not known yet."""
        return self.process is not None and self.process.is_at_end

    def needs_start(self, now: float) -> bool:
        """Tells whether the next process is due."""
        return self.state is WorkerState.BACKOFF and now >= self._restart_at

    def read(self, now: float) -> None:
        """Handles what the process has sent, and its end; sends what is left to."""
        if self.process is None:
            return
        if self.process.has_unsent:
            self.process.flush()
            self._wait_for_room()
        try:
            frames = self.process.read()
        except WorkerError as error:
            self.fail(f"sent what is no message: {error}")
            frames = []
        for frame in frames:
            # What is about to be killed was hung, and the signal that has it write its
            # stack may have woken it from a system call with a wrong result.
            if not self._hang:
                self._on_frame(frame, now)
        if self.process.is_at_end:
            self._unregister()  # else it stays readable until the status is known
        if self.process.is_at_end or self._hang:
            self._check_end(now)

    def watch(self, is_busy: bool, now: float) -> None:
        """Looks for a process that hangs, has ended, or has not closed in time."""
        if self.process is None:
            return
        self._check_end(now)
        if now >= self._kill_at:
            self.fail("did not end when asked to")
        elif self.state is WorkerState.STARTING:
            limit = self._config.reset_timeout_seconds
            if now - self._beat_at > limit:
                self.fail(f"took longer than {limit:g} s to build an env")
        elif is_busy and self._slab is not None:
            self._check_heartbeat(self._slab, now)

    def note_step(self) -> None:
        """Hears that a step has succeeded: the next end is no failure to start."""
        self._failures = 0
        self._has_stepped = True

    def begin_close(self, kill_at: float) -> None:
        """Asks the process to end; it is killed if it has not by `kill_at`."""
        self._kill_at = min(self._kill_at, kill_at)
        if self._is_closing:
            return
        self._is_closing = True
        if self.process is None:
            self.state = WorkerState.ENDED
        else:
            self.process.send(pack_frame(Kind.CLOSE))
            self._wait_for_room()

    def drop(self) -> None:
        """Forgets the process, whatever it does."""
        self._release()
        self.state = WorkerState.ENDED

    def _wait_for_room(self) -> None:
        """Has the selector wake us when what is left unsent can be sent."""
        process = self.process
        if process is None or process.fileno() not in self._selector.get_map():
            return
        events = selectors.EVENT_READ
        if process.has_unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(process, events, self)

    def _unregister(self) -> None:
        if (
            self.process is not None
            and self.process.fileno() in self._selector.get_map()
        ):
            self._selector.unregister(self.process)

    def _on_frame(self, frame: Frame, now: float) -> None:
        self._beat_at = now
        if frame.kind is Kind.DONE and self.state is WorkerState.SERVING:
            self._listener.on_done(self, frame)
        elif frame.kind is Kind.READY and self.state is WorkerState.STARTING:
            self._on_ready(frame)
        elif frame.kind is Kind.FAILED:
            self._traceback = frame.payload.decode(errors="replace")
        elif frame.kind is Kind.UNKNOWN_ENV:
            self.error = UnknownEnv(frame.payload.decode(errors="replace"))
        elif frame.kind is Kind.BAD_WRAPPER:
            self.error = WrapperError(frame.payload.decode(errors="replace"))
        elif frame.kind is not Kind.BUILT:
            self.fail(f"sent {frame.kind.name} when it should not")

    def _on_ready(self, frame: Frame) -> None:
        try:
            spaces = codec.decode(frame.payload, max_bytes=_MAX_SPACES_BYTES)
            spec = EnvSpec(
                self._config.env_name,
                restore(spaces["observation"]),
                restore(spaces["action"]),
            )
        except (codec.CodecError, SpaceError, TypeError, KeyError) as error:
            self.fail(f"sent spaces that cannot be read: {error}")
            return
        self.state = WorkerState.SERVING
        self._listener.on_ready(self, spec)

    def _check_heartbeat(self, slab: Slab, now: float) -> None:
        counter, is_slow = slab.heartbeats[self.index, :2]
        beat = (int(counter), int(is_slow))
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
            return
        limit = (
            self._config.reset_timeout_seconds
            if is_slow
            else self._config.step_timeout_seconds
        )
        if now - self._beat_at > limit:
            what = "reset or call" if is_slow else "step"
            option = "reset_timeout" if is_slow else "step_timeout"
            self.fail(
                f"a {what} timed out after {limit:g} s; "
                f"raise {option} if the env may take that long",
                Status.TIMEOUT,
            )

    def fail(self, reason: str, status: Status = Status.WORKER_DIED) -> None:
        """Kills a process that misbehaves; says why when it has ended."""
        if not self._hang and self.process is not None:
            self._hang, self._hang_status = reason, status
            self.process.kill(has_stack=status is Status.TIMEOUT)

    def _check_end(self, now: float) -> None:
        """Acts on the end of the process, once its exit status is known."""
        process = self.process
        if process is None:
            return
        has_exited = process.poll_exit() is not None
        if process.is_at_end or has_exited:
            self._at_end_since = min(self._at_end_since, now)
        is_overdue = now - self._at_end_since >= _EXIT_STATUS_GRACE_SECONDS
        # A process that an env has started may hold the socket open for ever.
        if has_exited and (process.is_at_end or is_overdue):
            self._release()
            self.exit = process.exit
            self._on_end(str(process.exit), now)
        elif not has_exited:
            if is_overdue:
                # It may go on, and write to rows that are its successor's by then.
                self.fail("closed its socket without ending")
            self._check_kill(process, now)

    def _check_kill(self, process: WorkerHandle, now: float) -> None:
        """Gives the worker up if its process was killed but does not end."""
        # One that is not forked yet is the launcher's to wait for.
        if not self._hang or process.pid is None:
            return
        self._killed_at = min(self._killed_at, now)
        if now - self._killed_at < _KILL_SECONDS:
            return
        self._release()
        end = f"was killed, but has not ended within {_KILL_SECONDS:g} s"
        if not self._is_closing:
            self.error = WorkerError(
                f"{self.label} {self._hang}; its process {process.pid} {end}, and may "
                f"still write to its rows; end that process and start the pool anew"
            )
        self._on_end(end, now)

    def _release(self) -> None:
        """Lets go of the process."""
        if self.process is not None:
            self._unregister()
            self.process.close()
            self.process = None

    def _on_end(self, end: str, now: float) -> None:
        """Tells the pool how a process has ended, and plans the next one."""
        if self._is_closing:
            self.state = WorkerState.ENDED
            return
        # Who dies while it has nothing to do has not failed to get anything running:
        # something else has killed it, however often that is between two steps.
        is_failure = self.state is WorkerState.STARTING or self._listener.is_at_work(
            self
        )
        if is_failure:
            self._failures += 1
        status = self._hang_status if self._hang else Status.WORKER_DIED
        text = f"{self._hang}; it {end}" if self._hang else end
        if self._traceback:
            text = f"stopped:\n{self._traceback.rstrip()}"
        self._plan_restart(text, now)
        if self.error is None and self._slab is None:
            # Else the pool says it, or who waits for the pool is told.
            _LOGGER.warning("%s %s%s", self.label, text, self.excerpt_note)
        self._listener.on_lost(self, status, text)

    @property
    def excerpt_note(self) -> str:
        """What the last process has written to stderr, to be added to a message."""
        excerpt = "" if self.exit is None else self.exit.excerpt
        return f"; its stderr ends:\n{excerpt}" if excerpt else ""

    def _plan_restart(self, text: str, now: float) -> None:
        """Gives up at once for an env that cannot be built, else after some tries."""
        never_ran = self._slab is None
        limit = self._config.max_restarts
        if self.error is not None:
            self.state = WorkerState.ENDED
            return
        if self._failures > limit or (never_ran and self._traceback):
            tries = "" if self._failures == 1 else f" {self._failures} times in a row"
            self.error = EnvStartError(
                f"{self.label} failed{tries} to get its {self._config.env_name} "
                f"running"
                + ("" if self._traceback else f": it {text}{self.excerpt_note}"),
                remote_traceback=self._traceback,
            )
            self.state = WorkerState.ENDED
            return
        self.state = WorkerState.BACKOFF
        delay = 0.0
        if self._failures > 1:
            delay = min(
                _FIRST_BACKOFF_SECONDS * 2.0 ** (self._failures - 2),
                _MAX_BACKOFF_SECONDS,
            )
        self._restart_at = now + delay
        if not self._has_stepped:
            earliest = self._started_at + _START_SECONDS
            self._restart_at = max(self._restart_at, earliest)

    def __repr__(self) -> str:
        """Returns the label, the state and the process."""
        return f"<{self.label}, {self.state.name}, {self.process!r}>"
