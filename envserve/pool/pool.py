"""Starts, watches and restarts the workers of one host; owns the slab.

No event loop and no threads: a descriptor to wait for, and `collect`, which goes on
with whatever is due. A worker's end costs its blocks one transition, never more.

An interrupt while it waits costs nothing. After one in its bookkeeping, who called
says `lose`, which replaces all workers: no line is written so that it could be cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Self

from envserve.errors import EnvserveError, EnvStartError, LocalProtocolError
from envserve.host_resources import num_cores
from envserve.lane import Call, Outcome, Reset, make_blocks
from envserve.pool.block_operations import BlockOperations, Task, reset_task
from envserve.pool.fault_log import FaultLog
from envserve.pool.inspector import PoolInspector
from envserve.pool.launcher import Launcher
from envserve.pool.pool_metrics import PoolMetrics
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_set import WorkerSet
from envserve.pool.worker_states import Lost, WorkerState
from envserve.settings import PoolSettings
from envserve.slab import Rows, Status
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.attribute_calls import call_payload
from envserve.worker.channel import Kind

__all__ = ["Pool"]

#: When a busy worker is looked at, at the latest.
_WATCH_SECONDS: Final = 0.1
_CLOSE_GRACE_SECONDS: Final = 1.0


class Pool:
    """Equal envs in worker processes of this host. Satisfies `lane.Lane`.

    Methods are called from one thread at a time. Starting and restarting go on only
    inside `collect`.

    Attributes:
      config: What was to be built.
      blocks: The blocks, which partition the rows.
      num_envs: Number of rows.
      metrics: Counts of steps, faults, restarts and durations.
      inspector: State of the pool for readers in other threads.
      is_waiting: Whether a call that was interrupted did nothing but wait.
    """

    name = "local"
    given_up: EnvserveError | None = None  # workers that are, end their operations

    def __init__(
        self,
        config: PoolSettings,
        *,
        launcher: Launcher | None = None,
        label: str = "",
        owner: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts all workers and returns at once; see `is_ready`.

        Args:
          config: What to build.
          launcher: Shared with other pools; by default the pool has its own.
          label: What its lines in the log begin with, to tell it from other pools.
          owner: Whose envs they are: no owner's repro files push out another's.
          clock: Monotonic seconds.

        Raises:
          EnvStartError: The `env_kwargs` or `wrappers` are not plain values.
        """
        self.config = config
        self.num_envs = config.num_envs
        self.blocks = make_blocks(
            *(config.num_envs, config.num_workers, config.num_splits),
            config.blocks_per_split,
        )
        self._clock = clock
        self._workers = WorkerSet(config, self.blocks, launcher, clock)
        self._has_cores_for_all = len(self._workers.all) <= num_cores()
        log = FaultLog(config, label, owner)
        counts_resets = config.autoreset == "next_step"
        self.metrics = PoolMetrics(self.blocks, counts_resets=counts_resets)
        self._operations = BlockOperations(
            self.blocks, self._workers, log, self.metrics
        )
        self.inspector = PoolInspector(self._workers, self._operations)
        self.is_waiting = self._is_released = False
        try:
            self._advance(0.0, clock())
        except BaseException:
            self.close()
            raise

    # What a lane has.

    @property
    def spec(self) -> EnvSpec:
        """Spaces of the envs; raises LocalProtocolError before the pool is ready."""
        if self._workers.spec is None:
            raise LocalProtocolError("the pool is still starting; wait for is_ready")
        return self._workers.spec

    @property
    def rows(self) -> Rows:
        """The slab's rows; raises LocalProtocolError unless the pool is ready."""
        if self._workers.slab is None:
            raise LocalProtocolError(f"{self!r} has no rows; wait for is_ready")
        return self._workers.slab.rows

    @property
    def error(self) -> EnvserveError | None:
        """Why the pool has failed, if it has."""
        return self._workers.error

    @property
    def is_ready(self) -> bool:
        """Whether all envs are built, so that blocks can be submitted."""
        return self._operations.state == "ready"

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""
        return bool(self._operations.num_running or self._operations.outcomes)

    @property
    def absent(self) -> Collection[int]:
        """Blocks in flight whose envs are not there now."""
        return self._operations.absent

    @property
    def is_closed(self) -> bool:
        """Whether every worker has ended after `begin_close`."""
        return self._operations.state == "closing" and self._workers.have_ended

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """Process ids of the workers; None for one that does not run."""
        return self._workers.pids

    def fileno(self) -> int:
        """A descriptor (epoll or kqueue) that is readable when `collect` is due."""
        return self._workers.selector.fileno()

    def next_deadline(self) -> float | None:
        """When `collect` must be called even if no descriptor is readable."""
        watch_at = self._workers.watch_at
        return None if watch_at == math.inf else watch_at

    def stats(self) -> Mapping[str, int]:
        """Returns how often workers were replaced."""
        return {"restarts": self.metrics.restarts}

    def finish_start(self, deadline: float) -> None:
        """Waits until all envs are built.

        Raises:
          EnvStartError: An env could not be built, or not before the deadline.
        """
        while not self.is_ready and self.error is None:
            remaining = deadline - self._clock()
            if remaining <= 0:
                self.close()
                raise EnvStartError(
                    f"expected {self.num_envs} {self.config.env_name} in time; they "
                    "are still being built; raise start_timeout if that may take so "
                    "long"
                )
            self.collect(remaining)
        if self.error is not None:
            self.close()
            raise self.error

    # Submitting.

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Starts a step of these blocks, with the actions now in `rows.action`."""
        self._operations.check_idle(blocks)
        self._submit(Kind.STEP, blocks, ())

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Starts resets, each of another block; raises what `Reset.check` does."""
        indices = [reset.block for reset in resets]
        self._operations.check_idle(indices)
        tasks = [reset_task(self.blocks[reset.block], reset) for reset in resets]
        self._operations.record_resets(resets)
        self._submit(Kind.RESET, indices, tasks)

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Starts attribute access, each on envs of another block.

        Raises:
          CallError: The arguments are too long.
        """
        indices = [call.block for call in calls]
        self._operations.check_idle(indices)
        self._submit(
            Kind.CALL,
            indices,
            [(call_payload(call, len(self.blocks)), False) for call in calls],
        )

    def _submit(self, kind: int, indices: Sequence[int], tasks: Sequence[Task]) -> None:
        """Sends operations: one write per worker, however many of its blocks."""
        now = self._clock()
        workers = self._workers
        workers.watch_at = min(workers.watch_at, now + _WATCH_SECONDS)
        for worker, messages in self._operations.begin(
            kind, indices, tasks, now
        ).items():
            worker.send(b"".join(messages), len(messages), now)

    # Going on.

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Goes on with all that is due; returns what has ended, as of `Lane.collect`.

        While the pool starts, the wait ends when it is ready or has failed.
        """
        if self._is_released:
            raise LocalProtocolError(f"{self!r} can no longer be used")
        self.is_waiting = False
        operations = self._operations
        if len(operations.outcomes) < min_finished and not operations.has_new_absent:
            self._wait(timeout_seconds, min_finished)
        operations.has_new_absent = False
        finished, operations.outcomes = operations.outcomes, []
        return finished

    def _wait(self, timeout_seconds: float, min_finished: int) -> None:
        operations, workers = self._operations, self._workers
        now = self._clock()
        give_up_at = now + timeout_seconds
        was_starting = operations.state == "starting"
        while True:
            if not (was_starting or operations.num_running):
                give_up_at = now  # nothing more will come
            missing = min_finished - len(operations.outcomes)
            is_for_all = 1 < missing >= operations.num_running
            self._advance(give_up_at - now, now, is_for_all)
            if len(operations.outcomes) >= min_finished or operations.has_new_absent:
                return
            now = self._clock()
            if now >= give_up_at or workers.error is not None or self.is_closed:
                return
            if was_starting and operations.state != "starting":
                return

    def _advance(
        self, timeout_seconds: float, now: float, is_for_all: bool = False
    ) -> None:
        """Waits for something to happen, at most so long, and handles it.

        Who waits for all workers need not be woken by each: the core that it wakes on
        is one that another still needs. So it waits for the one that is likely to end
        last, as it did before. With many workers to each core it is better to read what
        they have sent while others still run.
        """
        workers, operations = self._workers, self._operations
        timeout_seconds = max(0.0, min(timeout_seconds, workers.watch_at - now))
        last = operations.likely_last
        ready: Iterable[SupervisedWorker] = workers.all
        self.is_waiting = True
        if (
            is_for_all
            and self._has_cores_for_all
            and last is not None
            and last.num_unanswered
            and last.process is not None
            and last.state is WorkerState.SERVING
        ):
            last.process.channel.wait(timeout_seconds)
        else:
            ready = [key.data for key, _ in workers.selector.select(timeout_seconds)]
        self.is_waiting = False
        now = self._clock()
        for worker in ready:
            for event in worker.read(now):
                operations.handle(worker, event, now)
            if worker.is_ending or worker.state is WorkerState.KILLED:
                workers.watch_at = now
        if now >= workers.watch_at:
            for worker, event in workers.watch(now):
                operations.handle(worker, event, now)
            if workers.error is not None and operations.state != "closing":
                self.begin_close()

    def lose(self, text: str) -> None:
        """Takes all envs for lost, and forgets what is in flight.

        All processes are killed and new ones started, whatever state an interrupt has
        left the old ones in; nothing more comes of what they did.
        """
        if self._operations.state != "closing":
            lost = Lost(Status.WORKER_DIED, f"was replaced: {text}")
            replaced = self._workers.replace(lost.text, self._clock())
            self._operations.invalidate_all(replaced, lost, self._clock())

    # Closing.

    def begin_close(self, grace_seconds: float = _CLOSE_GRACE_SECONDS) -> None:
        """Asks all workers to end; `collect` goes on until `is_closed`.

        Args:
          grace_seconds: When to kill who has not ended; a second call may only hasten.
        """
        self._operations.state = "closing"
        self._workers.begin_close(grace_seconds)

    def close(self) -> None:
        """Ends all workers: politely, then by force, within 2 seconds."""
        if not self._is_released:
            self.begin_close()
            self._workers.close(_CLOSE_GRACE_SECONDS + 0.8)
            self._is_released = True
            self._operations.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self._operations.state
        return (
            f"<Pool {self.config.env_name}, {self.num_envs} envs in "
            f"{len(self._workers.all)} workers, {state}, "
            f"{self._operations.num_running} in flight>"
        )
