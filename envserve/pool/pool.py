"""Starts, watches and restarts the workers of one host; owns the slab.

No event loop and no threads: a descriptor to wait for, and `collect`, which goes on
with whatever is due. A worker's end costs its blocks one transition, never more.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from envserve import codec
from envserve.channel import Frame, Kind, pack_frame
from envserve.cores import num_cores
from envserve.errors import (
    CallError,
    EnvserveError,
    EnvStartError,
    LocalProtocolError,
    WorkerError,
)
from envserve.lane import (
    Block,
    Call,
    Fault,
    Outcome,
    PoolConfig,
    Reset,
    make_blocks,
)
from envserve.pool.fault_log import FaultLog
from envserve.pool.launcher import Launcher
from envserve.pool.operations import Operation, call_operation, reset_operation
from envserve.pool.supervisor import SupervisedWorker, WorkerState
from envserve.reports import read_report
from envserve.slab import (
    Rows,
    Slab,
    Status,
    keep_last_observation,
    restore_last_observation,
    write_lost,
    write_pending,
)
from envserve.spec import EnvSpec
from envserve.wrappers import plain_wrappers

__all__ = ["Pool"]

_LOGGER: Final = logging.getLogger("envserve.pool")

#: How often heartbeats of busy workers are looked at; bounds how late a hang is seen.
_WATCH_SECONDS: Final = 0.1
#: How soon to ask again for the exit status of a process that has just ended.
_EXIT_STATUS_SECONDS: Final = 0.002
_CLOSE_GRACE_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Loss:
    """A block whose episodes have ended with their worker.

    Its envs are reset as soon as they are built, but the rows are left alone until the
    next step: until then they are the caller's to read.

    Attributes:
      status: What to report.
      text: What happened.
      sequence: Of the reset that is under way, or None.
      is_stale: Whether that reset has been followed by another one.
      is_ready: Whether the envs are reset.
      has_padded: Whether the caller has had padding, and knows.
      has_kept: Whether the last observations are the final ones already.
      pad_at: When to end a step of it as padding, if the envs are not back by then.
      is_published: Whether they are back, and are about to write to the rows.
    """

    status: Status
    text: str
    sequence: int | None = None
    is_stale: bool = False
    is_ready: bool = False
    has_padded: bool = False
    has_kept: bool = False
    pad_at: float = math.inf
    is_published: bool = False


class Pool:
    """Equal envs in worker processes of this host. Satisfies `lane.Lane`.

    Methods are called from one thread at a time. Starting and restarting go on only
    inside `collect`.
    """

    name = "local"

    def __init__(
        self,
        config: PoolConfig,
        *,
        launcher: Launcher | None = None,
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts all workers and returns at once; see `is_ready`.

        Args:
          config: What to build.
          launcher: Shared with other pools; by default the pool has its own.
          label: What its lines in the log begin with, to tell it from other pools.
          clock: Monotonic seconds.

        Raises:
          EnvStartError: The `env_kwargs` or `wrappers` are not plain values.
        """
        try:
            codec.encode(dict(config.env_kwargs))
            codec.encode(plain_wrappers(config.wrappers))
        except codec.CodecError as error:
            raise EnvStartError(f"env_kwargs or wrappers: {error}") from None
        self.config = config
        self._clock = clock
        self.blocks = make_blocks(
            config.num_envs, config.num_workers, config.num_splits
        )
        self._owns_launcher = launcher is None
        self._launcher = launcher or Launcher(config.import_modules, (config.env_name,))
        self._selector = selectors.DefaultSelector()
        num_workers = 1 + max(block.worker for block in self.blocks)
        self._workers = [
            SupervisedWorker(
                index,
                tuple(block for block in self.blocks if block.worker == index),
                num_workers,
                config,
                self._launcher,
                self._selector,
                self,
            )
            for index in range(num_workers)
        ]
        self._incarnations = [config.first_incarnation] * config.num_envs
        self._losses: dict[int, _Loss] = {}  # blocks whose envs are not back yet
        self._operations: dict[int, Operation] = {}
        self._sequence = 0
        self._is_alone = False  # the caller of the last step, as it has said
        self._num_restarts = 0
        self._num_padded = 0
        self._fault_log = FaultLog(config, _LOGGER, label)
        self._finished: list[Outcome] = []
        self._last_done: SupervisedWorker | None = None
        self._has_cores_for_all = num_workers <= num_cores()
        self._slab: Slab | None = None
        self._spec: EnvSpec | None = None
        self._specs: dict[int, EnvSpec] = {}  # of the workers that are ready first
        self._is_closing = False
        self._is_released = False
        self._watch_at = clock()
        self.error: EnvserveError | None = None
        try:
            self._watch(clock())
        except BaseException:
            self.close()
            raise

    # What a lane has.

    @property
    def spec(self) -> EnvSpec:
        """Spaces of the envs; raises LocalProtocolError before the pool is ready."""
        if self._spec is None:
            raise LocalProtocolError("the pool is still starting; wait for is_ready")
        return self._spec

    @property
    def rows(self) -> Rows:
        """The slab's rows; raises LocalProtocolError before the pool is ready."""
        if self._slab is None:
            raise LocalProtocolError("the pool is still starting; wait for is_ready")
        return self._slab.rows

    @property
    def num_envs(self) -> int:
        """Number of rows."""
        return self.config.num_envs

    @property
    def is_ready(self) -> bool:
        """Whether all envs are built, so that blocks can be submitted."""
        return self._slab is not None and not self._is_closing

    @property
    def is_closed(self) -> bool:
        """Whether every worker has ended after `begin_close`."""
        return self._is_closing and all(w.process is None for w in self._workers)

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """Process ids of the workers; None for one that does not run."""
        self._launcher.poll()
        return tuple(
            worker.process.pid if worker.process else None for worker in self._workers
        )

    def fileno(self) -> int:
        """A descriptor (epoll or kqueue) that is readable when `collect` is due."""
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        """When `collect` must be called even if no descriptor is readable."""
        return None if self._watch_at == math.inf else self._watch_at

    def running_seconds(self, now: float) -> dict[int, float]:
        """Returns for each busy block how long its operation has been running."""
        return {i: now - op.started_at for i, op in self._operations.items()}

    def stats(self) -> Mapping[str, int]:
        """Returns how often workers were replaced, and blocks padded."""
        return {"restarts": self._num_restarts, "padded": self._num_padded}

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""
        return bool(self._operations or self._finished)

    def submit_step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> None:
        """Starts a step of these blocks, with the actions now in `rows.action`.

        A block whose worker is being replaced is waited for, the first time for a
        moment, or else finishes as padding; see `lane.Lane`.
        """
        operations = [Operation(Kind.STEP, self._idle_block(i)) for i in blocks]
        self._is_alone = is_alone
        self._submit(operations, ticket)

    def submit_reset(self, resets: Sequence[Reset], ticket: int = 0) -> None:
        """Starts resets, each of another block.

        Raises:
          LocalProtocolError: A row is not of its block, or seeds are too few, too many
            or out of [0, 2**63).
        """
        operations = [reset_operation(self._idle_block(r.block), r) for r in resets]
        self._submit(operations, ticket)

    def submit_call(self, call: Call, ticket: int = 0) -> None:
        """Starts attribute access on one env, as an operation of its block.

        Raises:
          CallError: An argument is not a plain value, or too long.
        """
        if not 0 <= call.env_index < self.num_envs:
            raise LocalProtocolError(
                f"expected an env_index below {self.num_envs}; got {call.env_index}"
            )
        index = next(b.index for b in self.blocks if call.env_index < b.stop)
        self._submit([call_operation(self._idle_block(index), call)], ticket)

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Goes on with all that is due, and returns the operations that have ended.

        Args:
          timeout_seconds: Longest to wait; 0 does not wait.
          min_finished: How many to wait for. Fewer come back after the timeout, or when
            no more are in flight.
        """
        if self._is_released:
            raise LocalProtocolError(f"{self!r} can no longer be used")
        if len(self._finished) < min_finished:
            self._wait(timeout_seconds, min_finished)
        elif self._losses:
            self._advance(0.0)  # padding is there at once, and would be for ever
        finished, self._finished = self._finished, []
        return finished

    def begin_close(self, grace_seconds: float = _CLOSE_GRACE_SECONDS) -> None:
        """Asks all workers to end; `collect` goes on until `is_closed`.

        Args:
          grace_seconds: When to kill who has not ended; a second call may only hasten.
        """
        self._is_closing = True
        now = self._clock()
        self._watch_at = now
        for worker in self._workers:
            worker.begin_close(kill_at=now + grace_seconds)

    def close(self) -> None:
        """Ends all workers: politely, then by force, within 2 seconds."""
        if self._is_released:
            return
        self.begin_close()
        give_up_at = self._clock() + _CLOSE_GRACE_SECONDS + 0.8
        while not self.is_closed and self._clock() < give_up_at:
            self._advance(0.05)
        for worker in self._workers:
            if worker.process is not None:
                _LOGGER.error("%r cannot be killed", worker)
                worker.drop()
        if self._owns_launcher:
            self._launcher.close()
        if self._slab is not None:
            self._slab.close()
        self._selector.close()
        self._is_released = True

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the pool."""
        self.close()

    # Submitting.

    def _submit(self, operations: Sequence[Operation], ticket: int) -> None:
        """Sends operations: one write per worker, however many of its blocks."""
        if len({operation.block.index for operation in operations}) < len(operations):
            raise LocalProtocolError("expected each block once; got one of them twice")
        now = self._clock()
        # First: an operation whose submission is interrupted must be watched as well.
        self._watch_at = min(self._watch_at, now + _WATCH_SECONDS)
        outbox: dict[int, bytes] = {}
        for operation in operations:
            operation.sequence = self._next_sequence()
            operation.ticket = ticket
            operation.started_at = now
            self._operations[operation.block.index] = operation
            worker = self._workers[operation.block.worker]
            if worker.state is WorkerState.SERVING:
                frame = self._frame_of(operation)
                outbox[worker.index] = outbox.get(worker.index, b"") + frame
            elif worker.error is not None:
                self._finish(operation, error=worker.error)
        for worker_index, data in outbox.items():
            self._workers[worker_index].send(data, now)
        if self._losses:
            self._plan_padding(operations, now)
            self._pad(now)

    def _idle_block(self, index: int) -> Block:
        if not self.is_ready or not 0 <= index < len(self.blocks):
            raise LocalProtocolError(
                f"expected a pool that is ready and a block below {len(self.blocks)}; "
                f"got block {index} of {self!r}"
            )
        if index in self._operations:
            raise LocalProtocolError(
                f"block {index} is in flight; collect its result before you submit anew"
            )
        return self.blocks[index]

    def _frame_of(self, operation: Operation) -> bytes:
        """Returns what to send: in a lost block, all envs must be reset first."""
        loss = self._losses.get(operation.block.index) if self._losses else None
        if loss is None or operation.kind is Kind.CALL:
            return operation.frame()
        if loss.is_ready and _takes_any_episode(operation):
            self._keep_last_observation(operation.block, loss)
            loss.is_published = True
            index = operation.block.index
            return pack_frame(Kind.PUBLISH, index, operation.sequence)
        if operation.kind is Kind.STEP:
            return self._prepare_frame(operation.block, loss)
        is_under_way = loss.sequence is not None and not loss.is_stale
        if is_under_way and _takes_any_episode(operation):
            return b""  # else it would depend on time which episode comes
        loss.is_ready, loss.is_stale = False, loss.sequence is not None
        loss.has_kept = False
        return operation.frame()

    def _keep_last_observation(self, block: Block, loss: _Loss) -> None:
        if not loss.has_kept:
            keep_last_observation(self.rows, _rows_of(block))
            loss.has_kept = True

    def _prepare_frame(self, block: Block, loss: _Loss) -> bytes:
        """Returns what has the envs of a lost block reset, unless that is under way."""
        if loss.sequence is not None:
            return b""
        loss.sequence = self._next_sequence()
        return pack_frame(Kind.PREPARE, block.index, loss.sequence)

    def _next_sequence(self) -> int:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        return self._sequence

    # Padding.

    def _plan_padding(self, operations: Sequence[Operation], now: float) -> None:
        """Sets how long steps of lost blocks are waited for: once, then no more."""
        patience = self.config.padding_after_seconds
        for operation in operations:
            loss = self._losses.get(operation.block.index)
            if loss is not None:
                loss.pad_at = now if loss.has_padded else now + patience

    def _pad(self, now: float) -> None:
        """Ends steps of lost blocks as padding if it is time to."""
        is_anything_alive = len(self._losses) < len(self.blocks)
        for operation in list(self._operations.values()):
            loss = self._losses.get(operation.block.index)
            if (
                loss is None
                or operation.kind is not Kind.STEP
                or loss.is_published
                or (self._is_alone and not is_anything_alive)
            ):
                continue
            if now < loss.pad_at:
                self._watch_at = min(self._watch_at, loss.pad_at)
                continue
            loss.has_padded = True
            write_pending(self.rows, _rows_of(operation.block))
            self._num_padded += 1
            self._finish(operation, is_padding=True)

    # Going on.

    def _wait(self, timeout_seconds: float, min_finished: int) -> None:
        now = self._clock()
        give_up_at = now + timeout_seconds
        was_ready = self.is_ready
        while True:
            missing = min_finished - len(self._finished)
            is_for_all = 1 < missing >= len(self._operations)
            if (
                is_for_all
                and self._has_cores_for_all
                and self._wait_for_last(give_up_at - now, now)
            ):
                self._advance(0.0)
            else:
                self._advance(max(0.0, give_up_at - now))
            if len(self._finished) >= min_finished:
                return
            now = self._clock()
            if now >= give_up_at or self.is_ready != was_ready:
                return
            if self._finished and not self._operations:
                return
            if self.error is not None or self.is_closed:
                return

    def _wait_for_last(self, timeout_seconds: float, now: float) -> bool:
        """Waits for the worker that is likely to end last, as it did before.

        Returns False, without having waited, where that would not do.

        Who waits for all of them need not be woken by each: the core that it wakes on
        is one that another worker still needs. With many workers to each core it is
        better to read what they have sent while others still run.
        """
        last = self._last_done
        if (
            last is None
            or last.state is not WorkerState.SERVING
            or last.is_ending
            or any(worker.has_unsent for worker in self._workers)
            or all(o.block.worker != last.index for o in self._operations.values())
        ):
            return False
        last.wait(max(0.0, min(timeout_seconds, self._watch_at - now)))
        return True

    def _advance(self, timeout_seconds: float) -> None:
        """Waits for something to happen, at most so long, and handles it."""
        if timeout_seconds > 0.0:
            until_watch = max(0.0, self._watch_at - self._clock())
            timeout_seconds = min(timeout_seconds, until_watch)
        events = self._selector.select(timeout_seconds)
        now = self._clock()
        for key, _ in events:
            worker = key.data
            worker.read(now)
            if worker.is_ending or worker.process is None:
                self._watch_at = now
        if now >= self._watch_at:
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Looks after the workers; plans when to do so next."""
        busy = {operation.block.worker for operation in self._operations.values()}
        busy |= {
            self.blocks[index].worker
            for index, loss in self._losses.items()
            if loss.sequence is not None
        }
        delay = _WATCH_SECONDS if busy or self._is_closing else math.inf
        for worker in self._workers:
            worker.watch(worker.index in busy, now)
            if worker.needs_start(now) and not self._is_closing:
                worker.start(self._incarnations, now)
            if worker.is_ending:
                delay = _EXIT_STATUS_SECONDS
            elif worker.state in (WorkerState.STARTING, WorkerState.BACKOFF):
                delay = min(delay, _WATCH_SECONDS)
        self._watch_at = now + delay
        if self._losses:
            self._pad(now)

    def on_ready(self, worker: SupervisedWorker, spec: EnvSpec) -> None:
        """Makes the slab once all workers are ready, or takes one back in."""
        if self._spec is None:
            self._specs[worker.index] = spec
            if len(self._specs) == len(self._workers):
                self._make_slab()
            return
        different = self._spec.differences(spec)
        if different:
            worker.fail(f"came back with other spaces: {'; '.join(different)}")
            return
        frames = []
        for block in worker.blocks:
            operation = self._operations.get(block.index)
            loss = self._losses.get(block.index)
            is_reset = operation is not None and operation.kind is Kind.RESET
            if loss is not None and not is_reset:
                frames.append(self._prepare_frame(block, loss))
            if operation is not None and operation.kind is not Kind.STEP:
                frames.append(self._frame_of(operation))
        worker.send(b"".join(frames), self._clock())

    def _make_slab(self) -> None:
        spec = self._specs[0]
        for index, other in self._specs.items():
            different = spec.differences(other)
            if different:
                self._give_up(
                    EnvStartError(
                        f"{self._workers[index].label} has other spaces than the "
                        f"first worker: {'; '.join(different)}"
                    )
                )
                return
        try:
            self._slab = Slab.create(spec, self.num_envs, len(self._workers))
        except OSError as error:
            self._give_up(WorkerError(f"no shared memory for the rows: {error}"))
            return
        self._spec = spec
        for worker in self._workers:
            worker.attach(self._slab)

    def _give_up(self, error: EnvserveError) -> None:
        self.error = error
        self.begin_close()

    def is_at_work(self, worker: SupervisedWorker) -> bool:
        """Tells whether a worker that serves was asked for something."""
        for block in worker.blocks:
            loss = self._losses.get(block.index)
            if block.index in self._operations or (
                loss is not None and loss.sequence is not None
            ):
                return True
        return False

    def on_lost(self, worker: SupervisedWorker, status: Status, text: str) -> None:
        """Marks the worker's blocks lost; what runs on them ends with the next one."""
        if self._slab is None:
            if worker.error is not None:
                self._give_up(worker.error)
            return
        self._watch_at = now = self._clock()
        self._fault_log.worker_lost(
            worker, status, text, self._operations, self._slab, now
        )
        self._num_restarts += 1
        for block in worker.blocks:
            self._lose(block, status, f"{worker.label} {text}{worker.excerpt_note}")
            for row in range(block.start, block.stop):
                self._incarnations[row] += 1
            operation = self._operations.get(block.index)
            if operation is None:
                continue
            if worker.error is not None:
                self._finish(operation, error=worker.error)
            elif operation.kind is Kind.CALL:
                error = CallError(f"{worker.label} {text}, during a call")
                self._finish(operation, error=error)
            else:
                self._plan_padding([operation], now)

    def _lose(self, block: Block, status: Status, text: str) -> None:
        """Marks a block lost; if it was lost before, its episodes ended then."""
        old = self._losses.get(block.index)
        operation = self._operations.get(block.index)
        is_stepping = operation is not None and operation.kind is Kind.STEP
        if old is None:
            loss = self._losses[block.index] = _Loss(status, text)
            # Rows that were answered stay as they are: they may still have to be read.
            if is_stepping:
                self._keep_last_observation(block, loss)
            return
        self._losses[block.index] = _Loss(
            old.status, old.text, has_padded=old.has_padded
        )
        if is_stepping and old.has_kept:
            # A worker may have died while it published: nobody is to see half of it.
            restore_last_observation(self.rows, _rows_of(block))

    def on_done(self, worker: SupervisedWorker, frame: Frame) -> None:
        """Finishes the operation that was answered."""
        loss = self._losses.get(frame.block) if self._losses else None
        if loss is not None and loss.sequence == frame.sequence:
            self._on_prepared(worker, loss, frame)
            return
        operation = self._operations.get(frame.block)
        if operation is None or operation.sequence != frame.sequence:
            worker.fail(f"answered what was not asked, on block {frame.block}")
        elif operation.kind is Kind.CALL:
            self._finish(operation, result=frame.payload)
        elif loss is not None and operation.kind is Kind.STEP:
            self._finish(operation, faults=self._report_lost(operation.block))
        else:
            self._last_done = worker
            if operation.kind is Kind.STEP:
                worker.note_step()
            elif operation.is_whole_reset:
                self._losses.pop(frame.block, None)
            self._finish_with_report(worker, operation, frame.payload)

    def _on_prepared(self, worker: SupervisedWorker, loss: _Loss, frame: Frame) -> None:
        """Goes on with a step that waits for envs which have been reset by now."""
        block = self.blocks[frame.block]
        if frame.payload:
            try:
                report = read_report(frame.payload, block)
            except ValueError as error:
                worker.fail(f"sent a report that cannot be read: {error}")
                return
            for row in report.rebuilt:
                self._incarnations[row] += 1
        loss.sequence = None
        loss.is_ready, loss.is_stale = not loss.is_stale, False
        operation = self._operations.get(block.index)
        if operation is not None and (
            operation.kind is Kind.STEP
            or (loss.is_ready and _takes_any_episode(operation))
        ):
            worker.send(self._frame_of(operation), self._clock())

    def _finish_with_report(
        self, worker: SupervisedWorker, operation: Operation, payload: bytes
    ) -> None:
        if not payload:  # the usual case
            self._finish(operation)
            return
        try:
            report = read_report(payload, operation.block)
        except ValueError as error:
            worker.fail(f"sent a report that cannot be read: {error}")
            return
        for row in report.rebuilt:
            self._incarnations[row] += 1
        if report.faults:
            assert self._slab is not None, "it has been stepped"
            now = self._clock()
            for fault in report.faults:
                self._fault_log.env_failed(
                    fault, operation.block, worker, self._slab, now
                )
        self._finish(operation, faults=report.faults, infos=report.infos)

    def _report_lost(self, block: Block) -> list[Fault]:
        """Turns a block's rows into the one made-up transition that a loss costs."""
        loss = self._losses.pop(block.index)
        write_lost(self.rows, _rows_of(block), loss.status)
        return [
            Fault(row, loss.status, loss.text) for row in range(block.start, block.stop)
        ]

    def _finish(self, operation: Operation, **outcome: Any) -> None:
        del self._operations[operation.block.index]
        finished = Outcome(operation.block.index, operation.ticket, **outcome)
        self._finished.append(finished)

    def __repr__(self) -> str:
        """Returns the env, the numbers, and the state."""
        if self._is_closing:
            state = "closed" if self.is_closed else "closing"
        else:
            state = "ready" if self.is_ready else "starting"
        return (
            f"<Pool {self.config.env_name}, {self.num_envs} envs in "
            f"{len(self._workers)} workers, {state}, "
            f"{len(self._operations)} in flight>"
        )


def _takes_any_episode(operation: Operation) -> bool:
    """Tells whether the one will do that a lost block's envs begin anyway."""
    is_any_reset = operation.is_whole_reset and not operation.payload
    return operation.kind is Kind.STEP or is_any_reset


def _rows_of(block: Block) -> slice:
    return slice(block.start, block.stop)
