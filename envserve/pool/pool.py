"""Start, watch and restart the workers of one host, and own their slab.

A pool has no threads and no event loop. Its descriptor becomes readable when there is
work to do, and `collect` does the work. A worker's death costs each of its rows one
transition.

An interrupt (Ctrl-C) while the pool waits has no effect on it. After an interrupt at
any other point, the caller must call `invalidate`, which replaces all workers.
Therefore, the rest of the pool need not be safe against interrupts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Self

from msgspec.structs import replace

from envserve.errors import (
    EnvserveError,
    EnvStartError,
    LocalProtocolError,
    RemoteProtocolError,
)
from envserve.host_resources import num_cores
from envserve.lane import Call, Outcome, Reset, make_blocks, mark_harmless
from envserve.pool.block_operations import BlockOperations, Task, reset_task
from envserve.pool.fault_log import FaultLog
from envserve.pool.launcher import Launcher
from envserve.pool.pool_metrics import PoolMetrics
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_set import WorkerSet
from envserve.pool.worker_states import Lost, WorkerState
from envserve.settings import PoolSettings
from envserve.slab import Rows, Status
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import FrameRequest, FrameResult
from envserve.wire.constants import MAX_FRAMES_BYTES
from envserve.wire.status import LeaseStatus
from envserve.worker.attribute_calls import encode_call
from envserve.worker.channel import MessageKind

#: By default, workers whose envs are still being closed after this time are killed: an
#: env may write a video in `close`, or end a simulator.
_CLOSE_SECONDS: Final = 10.0
#: Nanoseconds for which workers render frames after a request.
_WATCH_NS: Final = 3_000_000_000
#: Maximum number of absent rows that a status lists.
_MAX_ABSENT: Final = 1024


class Pool:
    """Identical envs in worker processes on this host; implements `lane.Lane`.

    Only one thread at a time may call its methods, except those for observers. Workers
    are started and restarted only within `collect`.

    Attributes:
      config: Settings of the pool.
      blocks: The blocks, which partition the rows.
      num_envs: Number of rows.
      metrics: Counters of steps, faults, restarts and durations.
    """

    name = "local"
    # Always None: callers never wait for a worker that cannot be restarted, because the
    # operations of its blocks end with an error.
    give_up_error: EnvserveError | None = None

    def __init__(
        self,
        config: PoolSettings,
        *,
        launcher: Launcher | None = None,
        label: str = "",
        owner: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start all workers without waiting for them; see `is_ready`.

        Args:
          config: Settings of the pool.
          launcher: Starts the processes; by default, a new launcher that the pool owns.
          label: Prefix of the pool's log lines.
          owner: User of the envs; the crash folder limits the files of each owner.
          clock: Returns monotonic seconds.

        Raises:
          EnvStartError: The `env_kwargs` or `wrappers` are not plain values, or are too
            large.
        """
        self.config = config
        self.num_envs = config.num_envs
        self.blocks = make_blocks(
            config.num_envs,
            config.num_workers,
            config.num_splits,
            config.blocks_per_split,
        )
        self._clock = clock
        log = FaultLog(config, self.blocks, label, owner)
        counts_resets = config.autoreset == "next_step"
        self.metrics = PoolMetrics(self.blocks, counts_resets=counts_resets)
        self._is_released = False
        self._workers = WorkerSet(config, self.blocks, launcher, clock)
        self._workers_use_all_cores = len(self._workers.all) == num_cores()
        self._operations = BlockOperations(
            self.blocks, self._workers, log, self.metrics
        )
        try:
            self._advance(0.0, clock())
        except BaseException:
            self.close()
            raise

    # The interface of a lane.

    @property
    def spec(self) -> EnvSpec:
        """Spaces of the envs.

        Raises:
          LocalProtocolError: The pool is not ready yet.
        """
        if self._workers.spec is None:
            raise LocalProtocolError("the pool is still starting; wait for is_ready")
        return self._workers.spec

    @property
    def rows(self) -> Rows:
        """The slab's rows.

        Raises:
          LocalProtocolError: The pool is not ready.
        """
        if self._workers.slab is None:
            raise LocalProtocolError(f"{self!r} has no rows; wait for is_ready")
        return self._workers.slab.rows

    @property
    def error(self) -> EnvserveError | None:
        """The error that made the pool fail, or None."""
        return self._workers.error

    @property
    def is_ready(self) -> bool:
        """Whether all envs are built, so that operations can be submitted."""
        return self._operations.state == "ready"

    @property
    def is_busy(self) -> bool:
        """Whether any operation is in flight or not yet collected."""
        return bool(self._operations.num_in_flight or self._operations.outcomes)

    @property
    def absent(self) -> Collection[int]:
        """Indices of the blocks in flight whose envs are currently unavailable."""
        operations = self._operations
        return operations.absent if operations.losses else ()

    @property
    def is_closed(self) -> bool:
        """Whether every worker has ended after `begin_close`."""
        is_closing = self._operations.state == "closing"
        return is_closing and all(w.process is None for w in self._workers.all)

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """Process ids of the workers; None for workers without a process."""
        return self._workers.pids

    def fileno(self) -> int:
        """Return a descriptor (epoll, kqueue) that is readable if `collect` is due."""
        return self._workers.selector.fileno()

    def next_deadline(self) -> float:
        """Return the latest time at which to call `collect`; infinity if none."""
        return self._workers.watch_at

    def stats(self) -> Mapping[str, int]:
        """Return the lane's counters: only "restarts", the number of restarts."""
        return {"restarts": self.metrics.restarts}

    def finish_start(self, deadline: float) -> None:
        """Wait until all envs are built.

        Raises:
          EnvStartError: An env could not be built, or not before the deadline.
        """
        while not self.is_ready and self.error is None:
            remaining = deadline - self._clock()
            if remaining <= 0:
                self.close()
                raise EnvStartError(
                    f"expected {self.num_envs} {self.config.env_name} to be built "
                    f"before start_timeout; some are not ready yet; raise "
                    f"start_timeout if building may take longer"
                )
            self.collect(remaining)
        if self.error is not None:
            self.close()
            raise self.error

    # For observers. Any thread may use these, because they change neither counters nor
    # operations.

    @property
    def num_rows_in_flight(self) -> int:
        """Number of rows with an operation (step, reset or call) in flight."""
        return self._operations.num_rows_in_flight

    def status(self, max_episodes: int, **fields: Any) -> LeaseStatus:
        """Return the status of the pool's lease; see `PoolMetrics.status`."""
        lost = (w for w in self._workers.all if w.state is not WorkerState.SERVING)
        absent = sorted(row for w in lost for block in w.blocks for row in block.rows)
        return self.metrics.status(
            max_episodes,
            env_name=self.config.env_name,
            num_envs=self.num_envs,
            in_flight=self.num_rows_in_flight,
            absent=tuple(absent[:_MAX_ABSENT]),
            **fields,
        )

    def read_frames(self, request: FrameRequest) -> tuple[FrameResult, bytes]:
        """Request frames and return the newest ones, or return a row's flight record.

        Raises:
          RemoteProtocolError: The row has no flight record.
        """
        board, rows, record = self._workers.frame_board, request.rows, b""
        if request.record:
            if board is not None and rows:
                record = self._operations.fault_log.flight_record(rows[0])
            if not record:
                raise RemoteProtocolError(
                    "expected the row of an env that has been reset"
                )
            return FrameResult(), record
        if board is None:  # the pool is closed
            return FrameResult(), b""
        board.watch(rows, request.width, time.monotonic_ns() + _WATCH_NS)
        frames, bytes_left = [], MAX_FRAMES_BYTES
        known = request.after[: len(rows)]
        for row, serial in zip_longest(rows, known, fillvalue=0):
            frame = board.latest(row, serial)
            if frame is not None and len(frame.jpeg) <= bytes_left:
                total = self.metrics.running_return(row)
                frames.append(replace(frame, episode_return=total))
                bytes_left -= len(frame.jpeg)
        return FrameResult(pictures=tuple(frames)), b""

    # Submitting.

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Start a step of these blocks, with the actions in `rows.action`."""
        self._operations.check_idle(blocks)
        self._operations.submit(MessageKind.STEP, blocks, (), self._clock())

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Start resets of different blocks.

        Raises:
          LocalProtocolError: The rows or seeds are not valid; see `Reset.check`.
        """
        indices = [reset.block for reset in resets]
        self._operations.check_idle(indices)
        tasks = [reset_task(self.blocks[reset.block], reset) for reset in resets]
        self._operations.record_resets(resets)
        self._operations.submit(MessageKind.RESET, indices, tasks, self._clock())

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Start attribute calls on envs of different blocks.

        Raises:
          CallError: The arguments are too long.
        """
        indices = [call.block for call in calls]
        self._operations.check_idle(indices)
        tasks = [Task(encode_call(call, len(self.blocks))) for call in calls]
        self._operations.submit(MessageKind.CALL, indices, tasks, self._clock())

    # Progress.

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Make progress and return the outcomes; see `Lane.collect`.

        If the pool is starting, return when it is ready or has failed.
        """
        if self._is_released:
            raise LocalProtocolError(f"{self!r} can no longer be used")
        operations, workers = self._operations, self._workers
        now = self._clock()
        deadline = now + timeout_seconds
        was_starting = operations.state == "starting"
        while len(operations.outcomes) < min_finished and not operations.has_new_absent:
            if not (was_starting or operations.num_in_flight):
                deadline = now  # nothing is in flight, so do not wait for outcomes
            num_missing = min_finished - len(operations.outcomes)
            needs_all = 1 < num_missing >= operations.num_in_flight
            now = self._advance(deadline - now, now, needs_all)
            has_started = was_starting and operations.state != "starting"
            if now >= deadline or has_started or workers.error is not None:
                break
            if operations.state == "closing" and self.is_closed:
                break
        slab = workers.slab
        if slab is not None and slab.flags.tobytes() != slab.plain_flags:
            operations.replace_overwritten(slab.flags, now)
        operations.has_new_absent = False
        finished, operations.outcomes = operations.outcomes, []
        return finished

    def _advance(
        self, timeout_seconds: float, now: float, needs_all: bool = False
    ) -> float:
        """Wait for an event until the timeout, and process all events.

        If the caller needs all workers, and there are as many workers as cores, do not
        wake up for every worker, because waking up takes a core from a worker that is
        still running. Instead, wait for the worker that replied last the previous
        time, because it will probably be last again. With fewer workers than cores,
        this process has its own core; with more workers, another worker uses the core
        of one that waits. In both cases, it is faster to read each reply as it arrives.

        Return the time at which the events were read.
        """
        workers, operations = self._workers, self._operations
        timeout_seconds = max(0.0, min(timeout_seconds, workers.watch_at - now))
        last = operations.likely_last
        ready: Iterable[SupervisedWorker] = workers.all
        try:
            if (
                needs_all
                and self._workers_use_all_cores
                and last is not None
                and last.num_unanswered
                and last.process is not None
                and last.state is WorkerState.SERVING
            ):
                last.process.channel.wait(timeout_seconds)
            else:
                events = workers.selector.select(timeout_seconds)
                ready = [key.data for key, _ in events]
        except BaseException as error:
            mark_harmless(error)
            raise
        now = self._clock()
        for worker in ready:
            for event in worker.read(now):
                operations.handle(worker, event, now)
            if worker.is_ending or worker.state is WorkerState.KILLED:
                workers.watch_at = now
        if now >= workers.watch_at:
            for worker, event in workers.watch(now):
                operations.handle(worker, event, now)
            if operations.state != "closing":
                operations.fault_log.log_suppressed(now)
                if workers.error is not None:
                    self.begin_close()
        return now

    def invalidate(self, reason: str) -> None:
        """Replace all workers and discard operations; see `Lane.invalidate`.

        All processes are killed and new ones are started. Results of the old processes
        are discarded.
        """
        if self._operations.state != "closing":
            lost = Lost(Status.WORKER_DIED, f"was replaced: {reason}")
            replaced = self._workers.replace_all(lost.text, self._clock())
            self._operations.invalidate_all(replaced, lost, self._clock())

    # Closing.

    def begin_close(self, grace_seconds: float = _CLOSE_SECONDS) -> None:
        """Ask all workers to exit; `collect` continues until `is_closed`.

        Workers that have not begun to close their envs after 1 s, because they are
        still executing an operation or starting, are killed then.

        Args:
          grace_seconds: Time after which workers that are still running are killed. A
            second call can only shorten this time.
        """
        self._operations.state = "closing"
        self._workers.begin_close(grace_seconds)

    def close(self) -> None:
        """Close all workers, by force if necessary; see `Lane.close`."""
        if not self._is_released:
            self.begin_close()
            self._workers.close()
            self._is_released = True
            self._operations.fault_log.log_suppressed(self._clock(), 0.0)
            del self._operations.fault_log  # it uses the slab
            self.metrics.slab = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self._operations.state
        return (
            f"<Pool {self.config.env_name}, {self.num_envs} envs in "
            f"{len(self._workers.all)} workers, {state}, "
            f"{self._operations.num_in_flight} in flight>"
        )
