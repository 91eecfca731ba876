"""The operations of a pool's blocks, and the consequences of losing a worker.

A block is idle or in flight: it has at most one operation (step, reset or call). When a
worker is lost, all its blocks are lost, idle or not, and its operations are handled as
follows:

- A step of a lost block is sent to the worker's successor as a reset. Its outcome is
  one lost transition per row (truncated, with the status of the loss), and the block is
  no longer lost. Each loss therefore costs each row exactly one transition, whenever
  the loss happens. With autoreset "next_step", the reset is deferred to the next
  step.
- A reset is resent. If it resets the whole block, the block is no longer lost
  afterwards, and no lost transition is reported, because the caller has abandoned the
  episodes anyway.
- A call in flight fails, because the worker may already have executed it.

An env that raises is rebuilt by its worker. If it raises again before it has completed
a valid step, its process may be unusable (a broken CUDA context, exhausted memory), so
the worker is replaced. If `max_restarts` replacements in a row do not help, the env
itself is at fault, and the next operation raises its error.

A worker whose rows were overwritten by an env is replaced, too.

A lost block in flight is absent: its outcome is pending until the successor replies.
This module receives only events of the current worker process (see `worker_states`), so
only one process writes a row at a time. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from envserve.errors import CallError, EnvError, LocalProtocolError
from envserve.lane import Block, Fault, Outcome, Reset
from envserve.pool.fault_log import FaultLog
from envserve.pool.pool_metrics import MAX_DURATIONS, PoolMetrics
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_set import WorkerSet
from envserve.pool.worker_states import Event, Lost, Ready, WorkerState
from envserve.slab import (
    PENDING,
    Array,
    Rows,
    Status,
    copy_final_to_observation,
    copy_observation_to_final,
    write_lost,
)
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.attribute_calls import decode_results
from envserve.worker.channel import HEADER, ChannelMessage, MessageKind, pack_message
from envserve.worker.worker_report import decode_report

# These are plain ints, because every step compares them, and comparing enum members is
# slower.
_IDLE: Final = 0  # value of `kind` if no operation is in flight
_STEP: Final = int(MessageKind.STEP)
_PACK: Final = HEADER.pack
#: Largest values of terminated, truncated and status that a worker writes. Larger ones
#: show that an env has overwritten the rows.
_MAX_FLAGS: Final = np.array([[1], [1], [Status.PENDING]], np.uint8)


class Task(NamedTuple):
    """The content of a reset or call.

    Attributes:
      payload: Payload of the message.
      reset_rows: Rows of the pool that a reset resets.
    """

    payload: bytes = b""
    reset_rows: Sequence[int] = ()


_NO_TASK: Final = Task()


@dataclass(slots=True, eq=False)
class _BlockSlot:
    """A block and the operation that runs on it.

    Attributes:
      block: The block.
      worker: The worker that hosts the block.
      kind: STEP, RESET or CALL while an operation is in flight; otherwise IDLE.
      last_kind: Kind of the last operation.
      task: Content of the operation, unless it is a step.
      sequence: Sequence number of the operation, which identifies its reply.
      started_at: Time at which the operation was submitted or, if the block was lost
        after that, at which it was lost.
      has_final: Whether `save_final_observation` was called for the current step.
      failing_rows: Maps each row whose last step failed to the number of worker
        processes that were replaced for this reason since the row's last valid step.
      resetting: Rows whose next step only resets their envs, because they had a fault.
      steps_when_overwritten: Number of steps of the block when its rows were last
        overwritten; -1 if they never were.
    """

    block: Block
    worker: SupervisedWorker
    kind: int = _IDLE
    last_kind: int = _IDLE
    task: Task = _NO_TASK
    sequence: int = 0
    started_at: float = 0.0
    has_final: bool = False
    failing_rows: dict[int, int] = field(default_factory=dict)
    resetting: set[int] = field(default_factory=set)
    steps_when_overwritten: int = -1

    def save_final_observation(self, rows: Rows) -> None:
        """Copy the last observations of a lost step to `final_observation`, once.

        No process executes the step at this time. The status PENDING marks rows whose
        env the lost process had rebuilt: it has already written their final
        observation, and their `observation` may belong to the next episode.
        """
        if self.kind == _STEP and not self.has_final:
            pending = np.flatnonzero(rows.status[self.block.row_slice] == PENDING)
            copy_final_to_observation(rows, self.block.start + pending)
            copy_observation_to_final(rows, self.block.row_slice)
            self.has_final = True


class BlockOperations:
    """Tracks the operations of a pool's blocks.

    Attributes:
      num_in_flight: Number of blocks in flight.
      losses: Maps the index of each lost block to the status and text of the loss.
      has_new_absent: Whether a block has become absent since the flag was last cleared.
      outcomes: Outcomes of finished operations that have not been collected yet.
      metrics: Counters of these operations.
      fault_log: Log of faults; deleted when the pool is closed.
      likely_last: The worker whose reply arrived last, and will probably be the last
        one again; None if waiting for only this worker is not safe.
      state: "ready", or the reason why nothing can be submitted.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        workers: WorkerSet,
        fault_log: FaultLog,
        metrics: PoolMetrics,
    ) -> None:
        self.num_in_flight = 0
        self.has_new_absent = False
        self.metrics = metrics
        self._plain_outcomes = [Outcome(block.index) for block in blocks]
        self.outcomes: list[Outcome] = []
        self.likely_last: SupervisedWorker | None = None
        self.state = "starting"
        self._workers = workers
        self.fault_log = fault_log
        self._slots = [_BlockSlot(block, workers.all[block.worker]) for block in blocks]
        self.losses: dict[int, Lost] = {}
        self._sequence = 0
        self._is_next_step = workers.config.autoreset == "next_step"
        #: Payload of the RESET that is sent instead of the step of a lost block. With
        #: "next_step", it lists no rows, which defers the reset to the next step.
        self._reset_payload = codec.encode({"rows": []}) if self._is_next_step else b""

    @property
    def _rows(self) -> Rows:
        assert self._workers.slab is not None, "all workers have been ready"
        return self._workers.slab.rows

    @property
    def absent(self) -> Collection[int]:
        """Indices of the lost blocks that have an operation in flight."""
        return {index for index in self.losses if self._slots[index].kind}

    @property
    def num_rows_in_flight(self) -> int:
        """Number of rows with an operation in flight."""
        return sum(len(slot.block.rows) for slot in self._slots if slot.kind)

    # Submitting.

    def check_idle(self, indices: Sequence[int]) -> None:
        """Raise LocalProtocolError unless each block can start a new operation."""
        slots = self._slots
        for index in indices:
            if self.state != "ready" or not 0 <= index < len(slots):
                raise LocalProtocolError(
                    f"expected a pool that is ready, and a block below {len(slots)}; "
                    f"got block {index} of a pool that is {self.state}"
                )
            if slots[index].kind:
                raise LocalProtocolError(
                    f"block {index} is in flight; collect its result before you submit "
                    "another operation"
                )
        if len(set(indices)) < len(indices):
            raise LocalProtocolError("expected each block once; got a block twice")

    def submit(
        self, kind: int, indices: Sequence[int], tasks: Sequence[Task], now: float
    ) -> None:
        """Start operations on idle blocks, and send them, with one write per worker.

        There is one task per block, but none for steps.
        """
        workers = self._workers
        workers.watch_at = min(workers.watch_at, now + workers.watch_seconds)
        if tasks:
            # Parts of a long message may still be queued, so wait for all channels.
            self.likely_last = None
        sequence = self._sequence
        outbox: dict[SupervisedWorker, list[bytes]] = {}
        for position, index in enumerate(indices):
            slot = self._slots[index]
            slot.sequence = sequence = (sequence + 1) & 0xFFFFFFFF
            slot.kind = slot.last_kind = kind
            slot.has_final, slot.started_at = False, now
            self.num_in_flight += 1
            worker = slot.worker
            if not tasks and index not in self.losses:  # fast path
                message = _PACK(_STEP, index, sequence, 0)
            else:
                if tasks:
                    slot.task = tasks[position]
                if index in self.losses:
                    slot.save_final_observation(self._rows)
                    self.has_new_absent = True
                    if worker.error is not None:
                        self._finish(slot, Outcome(index, error=worker.error))
                message = self._message(slot)
            if worker.state is WorkerState.SERVING:
                outbox.setdefault(worker, []).append(message)
        self._sequence = sequence
        for worker, messages in outbox.items():
            worker.send(b"".join(messages), len(messages), now)

    def _message(self, slot: _BlockSlot) -> bytes:
        """Encode the operation of a block; the step of a lost block is a RESET."""
        kind, index, payload = slot.kind, slot.block.index, b""
        if kind != _STEP:
            payload = slot.task.payload
        elif index in self.losses:
            kind, payload = MessageKind.RESET, self._reset_payload
        return pack_message(kind, index, slot.sequence, payload)

    def record_resets(self, resets: Sequence[Reset]) -> None:
        """Record that episodes begin, and keep the reset options for repro files."""
        for reset in resets:
            block = self._slots[reset.block].block
            rows = reset.env_indices or block.rows
            self.metrics.begin_episodes(rows, block.index)
            if reset.options:
                self.fault_log.reset_options.update(dict.fromkeys(rows, reset.options))

    # Events of workers.

    def handle(self, worker: SupervisedWorker, event: Event, now: float) -> None:
        """Process a worker's event."""
        if type(event) is ChannelMessage:
            index = event.block
            slot = self._slots[index] if index < len(self._slots) else None
            if worker.state is not WorkerState.SERVING:
                return  # the worker was killed before this event was read
            if (
                slot is None
                or slot.worker is not worker
                or not slot.kind
                or slot.sequence != event.sequence
            ):
                worker.kill(
                    f"replied to an operation that was not submitted (block {index})",
                    now,
                )
                return
            self.likely_last = worker
            is_plain = slot.kind == _STEP and not event.payload
            tracks_rows = slot.failing_rows or slot.resetting
            if not is_plain or index in self.losses or tracks_rows:
                self._on_reply(slot, event.payload, now)
                return
            worker.has_stepped = True  # fast path
            slot.kind = _IDLE
            self.num_in_flight -= 1
            self.outcomes.append(self._plain_outcomes[index])
            metrics = self.metrics
            metrics.steps[index] += 1  # inlined from `record_step`
            metrics.durations.append(now - slot.started_at)
            if metrics.is_tracking or len(metrics.durations) > MAX_DURATIONS:
                metrics.update_episodes(index, now)
        elif isinstance(event, Ready):
            self._on_ready(worker, event.spec, now)
        elif isinstance(event, Lost):
            self._workers.watch_at = now  # the next watch starts the successor
            if self.state != "starting":
                self.metrics.faults[event.status] += 1
            if self.state != "starting" or worker.error is None:
                slots = self._slots_of(worker)
                running = {s.block.index: s.kind for s in slots if s.kind}
                self.fault_log.log_worker_loss(worker, event, running, now)
            self._mark_lost(worker, event, now)

    def _on_ready(self, worker: SupervisedWorker, spec: EnvSpec, now: float) -> None:
        workers = self._workers
        if not workers.accept_ready(worker, spec, now):
            return
        if self.state == "starting":
            assert workers.slab is not None, "all workers are ready"
            self.fault_log.attach(workers.slab, spec)
            self.metrics.slab = workers.slab
            self.state = "ready"
        slots = self._slots_of(worker)
        messages = [self._message(slot) for slot in slots if slot.kind]
        if messages:
            worker.send(b"".join(messages), len(messages), now)

    def _on_reply(self, slot: _BlockSlot, payload: bytes, now: float) -> None:
        """Finish an operation that needs more than the fast path of `handle`."""
        worker, block = slot.worker, slot.block
        try:
            if slot.kind == MessageKind.CALL:
                self._finish(slot, decode_results(payload, block))
                return
            max_infos_kib = self._workers.config.max_infos_kib
            outcome, rebuilt = decode_report(payload, block, max_infos_kib)
        except ValueError as error:
            worker.kill(f"sent an invalid report: {error}", now)
            return
        for row in rebuilt:
            self._workers.incarnations[row] += 1
        if slot.kind != _STEP:
            outcome = self._end_reset(slot, outcome, now)
        elif block.index in self.losses:
            outcome = self._end_loss(slot, now)
        else:
            self._end_step(slot, outcome, now)
        if outcome.warnings:
            outcome = outcome._replace(
                warnings=self.fault_log.warn_once(outcome.warnings)
            )
        self._finish(slot, outcome)

    def _end_loss(self, slot: _BlockSlot, now: float) -> Outcome:
        """Return the outcome of the first step of a lost block in its new process."""
        block = slot.block
        status, text = self.losses.pop(block.index)
        slot.resetting = {*block.rows} if self._is_next_step else set()
        write_lost(self._rows, block.row_slice, status)
        self.metrics.record_lost(block.index, status, slot.started_at, now)
        faults = [Fault(row, status, text) for row in block.rows]
        return Outcome(block.index, faults=faults)

    def _end_step(self, slot: _BlockSlot, outcome: Outcome, now: float) -> None:
        """Mark the rows that failed in a step, and record the step."""
        block, faults = slot.block, outcome.faults
        slot.worker.has_stepped |= len(slot.resetting) < len(block.rows)
        if slot.failing_rows or slot.resetting or faults:
            self._replace_if_failing(slot, faults, now)
        for fault in faults:
            row = fault.env_index
            write_lost(self._rows, slice(row, row + 1), fault.status)
            self.metrics.invalid[fault.status] += 1
        self._log_failures(slot, faults, outcome.retried, now)
        self.metrics.record_step(block.index, now - slot.started_at, now)

    def _end_reset(self, slot: _BlockSlot, outcome: Outcome, now: float) -> Outcome:
        """Return the outcome of a reset.

        If an env failed, the outcome is an error, although all envs were reset: the
        failed env was rebuilt, and reset without seed and options.
        """
        task, faults = slot.task, outcome.faults
        slot.resetting.difference_update(task.reset_rows)
        if len(task.reset_rows) == len(slot.block.rows):
            self.losses.pop(slot.block.index, None)
        elif faults and self._workers.config.vectorized:
            # The vector env was replaced, which has ended the episodes of all its rows.
            text = "the vector env was replaced, because a reset of some rows failed"
            self.losses.setdefault(slot.block.index, Lost(Status.WORKER_DIED, text))
            # The next step reports the last observations of these episodes.
            copy_final_to_observation(self._rows, slot.block.row_slice)
        has_arguments = bool(task.payload)  # errors are usually the caller's mistakes
        failures = [] if has_arguments else faults
        self._log_failures(slot, failures, outcome.retried, now)
        if not faults:
            return outcome
        error = self.fault_log.reset_error(faults[0])
        if has_arguments:
            self.fault_log.log_reset_error(error, len(faults), now)
        return Outcome(slot.block.index, error=error)

    def _log_failures(
        self,
        slot: _BlockSlot,
        faults: Sequence[Fault],
        retried: Sequence[Fault],
        now: float,
    ) -> None:
        # If a vector env fails, all its rows have the same fault.
        failures = faults[:1] if self._workers.config.vectorized else faults
        for fault in failures:
            self.metrics.faults[fault.status] += 1
        for fault in (*failures, *retried):
            self.fault_log.log_env_failure(fault, slot.worker, now)

    def _replace_if_failing(
        self, slot: _BlockSlot, faults: Sequence[Fault], now: float
    ) -> None:
        """Replace the process if an env failed twice in a row or ran out of memory.

        If `max_restarts` replacements have not helped, the worker fails permanently.
        """
        worker, config, reason = slot.worker, self._workers.config, ""
        previous = slot.failing_rows
        slot.failing_rows = {r: previous[r] for r in slot.resetting & previous.keys()}
        slot.resetting = {f.env_index for f in faults} if self._is_next_step else set()
        for fault in faults:
            row = fault.env_index
            env = f"env {config.first_env_index + row}"
            num_replaced = previous[row] + 1 if row in previous else 0
            slot.failing_rows[row] = num_replaced
            if num_replaced:
                reason = f"{env} failed twice in a row: {fault.cause}"
            elif "MemoryError" in fault.cause.partition(":")[0]:
                reason = f"{env} ran out of memory"
            if num_replaced > config.max_restarts and worker.error is None:
                number = config.max_restarts
                processes = f"{number} new worker process{'es' * (number > 1)}"
                suffix = f", also in {processes}" if number else ""
                worker.error = EnvError(
                    f"{env.capitalize()}: every step has failed{suffix}: {fault.cause}",
                    env_index=row,
                    remote_traceback=fault.detail,
                )
        if reason:
            worker.replace(reason, now)

    def _finish(self, slot: _BlockSlot, outcome: Outcome) -> None:
        slot.kind = _IDLE
        self.num_in_flight -= 1
        self.outcomes.append(outcome)

    def _mark_lost(self, worker: SupervisedWorker, lost: Lost, now: float) -> None:
        """Mark all blocks of a worker as lost; see the module docstring."""
        if self.state == "starting":
            self._workers.error = self._workers.error or worker.error
            return
        self.metrics.restarts += worker.error is None
        self.fault_log.clear_records(worker)
        text = f"{worker.label} {lost.text}"
        loss = Lost(lost.status, f"{text}{worker.stderr_note}")
        for slot in self._slots_of(worker):
            block = slot.block
            for row in block.rows:
                self._workers.incarnations[row] += 1
            if block.index not in self.losses:
                self.losses[block.index] = loss
                self.has_new_absent |= slot.kind != _IDLE
                slot.started_at = now
            # This changes only rows of steps in flight. The caller may not have read
            # the rows of finished steps yet.
            slot.save_final_observation(self._rows)
            # Servers must not send PENDING, even if the operation ends with an error.
            status = self._rows.status[block.row_slice]
            status[status == PENDING] = Status.OK
            if slot.kind and worker.error is not None:
                self._finish(slot, Outcome(block.index, error=worker.error))
            elif slot.kind == MessageKind.CALL:
                error = CallError(f"{text}, during a call")
                self._finish(slot, Outcome(block.index, error=error))

    def replace_overwritten(self, flags: Array, now: float) -> None:
        """Replace workers if an env has written to their rows by mistake.

        Impossible flags or statuses show that rows were overwritten. If they occur in
        the padding or in rows of several workers, all rows may be wrong, so all workers
        are replaced. Steps and resets of replaced workers are executed again, unless
        their outcomes were already collected.
        """
        # Usually, episodes have ended. Comparing bytes is faster than NumPy calls.
        flag_bytes = flags.tobytes()
        are_all_ok = flag_bytes.endswith(bytes(flags.shape[1]))
        if are_all_ok and not flag_bytes.translate(None, b"\0\1"):
            return
        invalid: Array = np.logical_or.reduce(flags > _MAX_FLAGS)
        finished = {outcome.block: outcome for outcome in self.outcomes}
        workers = set()
        for slot in self._slots:
            index, part = slot.block.index, slot.block.row_slice
            outcome, worker = finished.get(index), slot.worker
            if outcome and slot.last_kind == _STEP and outcome.error is None:
                num_faults = np.count_nonzero(flags[2, part])
                invalid[part] |= num_faults != len(outcome.faults)
            is_serving = worker.state is WorkerState.SERVING
            # Ignore a lost block without an outcome: the successor writes its rows
            # before the caller reads them.
            is_used = outcome or (index not in self.losses and is_serving)
            if is_used and invalid[part].any():
                workers.add(worker)
        padding = slice(slot.block.stop, None)
        if len(workers) > 1 or invalid[padding].any():
            workers = {*self._workers.all}
        flags[:, padding] = 0
        for slot in self._slots:
            if slot.worker in workers:
                self._discard_rows(slot, finished)
        for worker in workers:
            text = (
                "its rows were overwritten; an env probably writes outside its memory"
            )
            worker.replace(text, now)
            self._workers.watch_at = now
        self.outcomes = [*finished.values()]

    def _discard_rows(self, slot: _BlockSlot, finished: dict[int, Outcome]) -> None:
        """Mark a block's rows as lost; repeat its step or reset if it is not collected.

        If it is repeated, remove its outcome from `finished`.
        """
        index, worker, steps = slot.block.index, slot.worker, self.metrics.steps
        rows, part = self._rows, slot.block.row_slice
        write_lost(rows, part, Status.WORKER_DIED)
        for array in (*rows.observation, *rows.final_observation):
            array[part] = 0  # the values may be outside the observation space
        is_call = slot.last_kind == MessageKind.CALL
        if index in finished and worker.error is None and not is_call:
            num_faults = len(finished.pop(index).faults)
            slot.kind = slot.last_kind
            self.num_in_flight += 1
            if slot.kind == _STEP and num_faults < len(slot.block.rows):
                steps[index] -= 1
        # If no step has succeeded since the rows were last overwritten, count this as
        # a failed start: otherwise, the worker would be restarted forever.
        worker.has_stepped &= steps[index] != slot.steps_when_overwritten
        slot.steps_when_overwritten = steps[index]

    def invalidate_all(
        self, replaced: Sequence[SupervisedWorker], lost: Lost, now: float
    ) -> None:
        """Discard all operations, and mark the blocks of replaced workers as lost.

        Afterwards, each row contains its last valid observation.
        """
        for worker in replaced:
            self._mark_lost(worker, lost, now)
        for slot in self._slots:
            if slot.kind == _STEP and slot.has_final:
                copy_final_to_observation(self._rows, slot.block.row_slice)
            slot.kind = _IDLE
            slot.worker = self._workers.all[slot.worker.index]
        # The caller will not collect these outcomes. In rows with a fault, the current
        # observation already belongs to the next episode, so restore the last one of
        # the previous episode.
        for outcome in self.outcomes:
            rows = [fault.env_index for fault in outcome.faults]
            copy_final_to_observation(self._rows, rows)
        self.num_in_flight, self.likely_last = 0, None
        self.outcomes, self.has_new_absent = [], False

    def _slots_of(self, worker: SupervisedWorker) -> list[_BlockSlot]:
        return [slot for slot in self._slots if slot.worker is worker]


def reset_task(block: Block, reset: Reset) -> Task:
    """Return the task of a reset.

    Raises:
      LocalProtocolError: The rows or seeds are not valid; see `Reset.check`.
    """
    rows = reset.check(block)
    options, seeds = reset.options, reset.seeds
    payload = b""
    if reset.env_indices is not None or seeds is not None or options:
        fields = {"rows": reset.env_indices, "seeds": seeds, "options": options}
        payload = codec.encode(fields)
    return Task(payload, rows)
