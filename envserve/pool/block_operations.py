"""What runs on the blocks of a pool, and what comes of it.

A block is idle or in flight, and beside that it may be lost: its episodes have ended
with their worker, which costs one made-up transition. A step of a lost block is carried
out as a reset of it, and ends with that transition; a reset of the whole block leaves
nothing to pay. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from envserve.errors import CallError, LocalProtocolError
from envserve.lane import Block, Fault, Outcome, Reset
from envserve.pool.fault_log import FaultLog
from envserve.pool.pool_metrics import MAX_WAITS, PoolMetrics
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_set import WorkerSet
from envserve.pool.worker_states import Event, Lost, Ready, WorkerState
from envserve.slab import (
    Rows,
    Status,
    keep_last_observation,
    restore_last_observation,
    write_lost,
)
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.attribute_calls import read_answer
from envserve.worker.channel import HEADER, ChannelMessage, Kind, pack_message
from envserve.worker.worker_report import read_report

__all__ = ["BlockOperations", "Task", "reset_task"]

# Plain ints: members of enums cost more where every step passes.
_IDLE: Final = 0  # in place of a kind of operation
_STEP: Final = int(Kind.STEP)
_PENDING: Final = int(Status.PENDING)
_PACK: Final = HEADER.pack

#: The payload of an operation, and whether it resets all rows of the block.
Task = tuple[bytes, bool]


@dataclass(slots=True, eq=False)
class _BlockSlot:
    """A block, and what runs on it.

    Attributes:
      block: Which rows.
      worker: Who hosts it.
      kind: STEP, RESET or CALL from its submission until it has ended; else IDLE.
      task: What goes with it, unless it is a step.
      sequence: Number by which its answer is known.
      begun_at: When it was submitted, or its envs were lost since.
      has_kept: Whether the last observations are the final ones already.
    """

    block: Block
    worker: SupervisedWorker
    kind: int = _IDLE
    task: Task = b"", False
    sequence: int = 0
    begun_at: float = 0.0
    has_kept: bool = False

    def message(self, is_lost: bool) -> bytes:
        """Returns what to send to the worker."""
        index, sequence = self.block.index, self.sequence
        if self.kind != _STEP:
            return pack_message(self.kind, index, sequence, self.task[0])
        return pack_message(Kind.RESET if is_lost else Kind.STEP, index, sequence)

    def keep_last_observation(self, rows: Rows) -> None:
        """Makes the last observations the final ones, once for each lost step.

        The worker is not writing now. Where it has replaced an env before it died, it
        has kept that row's itself, and begun to write the next episode's.
        """
        if self.kind == _STEP and not self.has_kept:
            pending = np.flatnonzero(rows.status[self.block.part] == _PENDING)
            restore_last_observation(rows, self.block.start + pending)
            keep_last_observation(rows, self.block.part)
            self.has_kept = True


class BlockOperations:
    """What runs on the blocks of a pool.

    Attributes:
      num_running: Blocks in flight.
      has_new_absent: Whether a block has become absent since this was last cleared.
      outcomes: What has come of operations that have ended.
      metrics: Counts of these operations.
      likely_last: The worker that has answered last; None if it need not again.
      state: "ready", or why nothing can be submitted.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        workers: WorkerSet,
        fault_log: FaultLog,
        metrics: PoolMetrics,
    ) -> None:
        self.num_running = 0
        self.has_new_absent = False
        self.metrics = metrics
        self._plain_outcomes = [Outcome(block.index) for block in blocks]
        self.outcomes: list[Outcome] = []
        self.likely_last: SupervisedWorker | None = None
        self.state = "starting"
        self._workers = workers
        self._fault_log = fault_log
        self._slots = [_BlockSlot(block, workers.all[block.worker]) for block in blocks]
        self._losses: dict[int, Lost] = {}  # of blocks that are lost
        self._sequence = 0

    @property
    def _rows(self) -> Rows:
        assert self._workers.slab is not None, "all workers have been ready"
        return self._workers.slab.rows

    @property
    def absent(self) -> Collection[int]:
        """Blocks in flight that are lost."""
        if not self._losses:
            return ()
        return {index for index in self._losses if self._slots[index].kind}

    def rows_where(self, test: Callable[[SupervisedWorker, int], object]) -> list[int]:
        """Returns rows by their worker, and by what kind of operation runs on them."""
        slots = (p for p in self._slots if test(p.worker, p.kind))
        return [row for slot in slots for row in slot.block.rows]

    # Submitting.

    def check_idle(self, indices: Sequence[int]) -> None:
        """Raises LocalProtocolError for blocks that cannot be submitted."""
        slots = self._slots
        for index in indices:
            if self.state != "ready" or not 0 <= index < len(slots):
                raise LocalProtocolError(
                    f"expected a pool that is ready and a block below {len(slots)}; "
                    f"got block {index} of one that is {self.state}"
                )
            if slots[index].kind:
                raise LocalProtocolError(
                    f"block {index} is in flight; collect its result before you submit "
                    "anew"
                )
        if len(set(indices)) < len(indices):
            raise LocalProtocolError("expected each block once; got one of them twice")

    def begin(
        self, kind: int, indices: Sequence[int], tasks: Sequence[Task], now: float
    ) -> dict[SupervisedWorker, list[bytes]]:
        """Notes STEPs, RESETs or CALLs on blocks that are idle; returns what to send.

        A task goes with each block; none with steps.
        """
        if tasks:
            self.likely_last = None  # what is long may not be sent at once
        sequence = self._sequence
        outbox: dict[SupervisedWorker, list[bytes]] = {}
        for position, index in enumerate(indices):
            slot = self._slots[index]
            slot.sequence = sequence = (sequence + 1) & 0xFFFFFFFF
            slot.kind, slot.has_kept, slot.begun_at = kind, False, now
            self.num_running += 1
            worker = slot.worker
            if not tasks and index not in self._losses:  # the usual case
                message = _PACK(_STEP, index, sequence, 0)
            else:
                if tasks:
                    slot.task = tasks[position]
                if index in self._losses:
                    self._begin_lost(slot)
                message = slot.message(index in self._losses)
            if worker.state is WorkerState.SERVING:
                outbox.setdefault(worker, []).append(message)
        self._sequence = sequence
        return outbox

    def record_resets(self, resets: Sequence[Reset]) -> None:
        """Keeps what envs are about to be reset with, should they fail after that."""
        for reset in resets:
            block = self._slots[reset.block].block
            rows = reset.env_indices or block.rows
            self.metrics.begin_episodes(rows, block.index)
            if reset.options:
                self._fault_log.options.update(dict.fromkeys(rows, reset.options))

    def _begin_lost(self, slot: _BlockSlot) -> None:
        slot.keep_last_observation(self._rows)
        self.has_new_absent = True
        if slot.worker.error is not None:
            self._end(slot, Outcome(slot.block.index, error=slot.worker.error))

    # What happens to workers.

    def handle(self, worker: SupervisedWorker, event: Event, now: float) -> None:
        """Does what an event asks for."""
        if type(event) is ChannelMessage:
            index = event.block
            slot = self._slots[index] if index < len(self._slots) else None
            if worker.state is not WorkerState.SERVING:
                return  # it was killed for what it has said before
            if slot is None or not slot.kind or slot.sequence != event.sequence:
                worker.fail(f"answered what was not asked, on block {index}", now)
                return
            self.likely_last = worker
            if slot.kind != _STEP or event.payload or index in self._losses:
                self._on_answer(slot, event.payload, now)
                return
            worker.has_stepped = True  # the usual case
            slot.kind = _IDLE
            self.num_running -= 1
            self.outcomes.append(self._plain_outcomes[index])
            metrics = self.metrics
            metrics.steps[index] += 1  # as `record_step` does
            metrics.waits.append(now - slot.begun_at)
            if metrics.is_watched or len(metrics.waits) > MAX_WAITS:
                metrics.follow_episodes(index, now)
        elif isinstance(event, Ready):
            self._on_ready(worker, event.spec, now)
        elif isinstance(event, Lost):
            self._workers.watch_at = now  # its successor is to be started
            if self.state != "starting":
                self.metrics.faults[event.status] += 1
                slots = self._hosted_by(worker)
                running = {p.block.index: p.kind for p in slots if p.kind}
                self._fault_log.worker_lost(worker, event, running, now)
            self._lose(worker, event, now)

    def _on_ready(self, worker: SupervisedWorker, spec: EnvSpec, now: float) -> None:
        workers = self._workers
        if not workers.admit(worker, spec, now):
            return
        if self.state == "starting":
            assert workers.slab is not None, "all workers are ready"
            self._fault_log.attach(workers.slab, spec)
            self.metrics.slab = workers.slab
            self.state = "ready"
        messages = [
            slot.message(slot.block.index in self._losses)
            for slot in self._hosted_by(worker)
            if slot.kind
        ]
        if messages:
            worker.send(b"".join(messages), len(messages), now)

    def _on_answer(self, slot: _BlockSlot, payload: bytes, now: float) -> None:
        """Ends an operation of which there is more to say than that it is done."""
        worker, block, config = slot.worker, slot.block, self._workers.config
        is_step = slot.kind == _STEP
        try:
            if slot.kind == Kind.CALL:
                self._end(slot, read_answer(payload, block))
                return
            outcome, rebuilt = read_report(payload, block, config.max_infos_kib)
        except ValueError as error:
            worker.fail(f"sent a report that cannot be read: {error}", now)
            return
        for row in rebuilt:
            self._workers.incarnations[row] += 1
        if is_step and block.index in self._losses:
            status, text = self._losses.pop(block.index)
            write_lost(self._rows, block.part, status)
            self.metrics.record_lost(block.index, status, slot.begun_at, now)
            lost = [Fault(row, status, text) for row in block.rows]
            self._end(slot, Outcome(block.index, faults=lost))
            return
        if is_step:
            worker.has_stepped = True
        elif slot.task[1]:
            self._losses.pop(block.index, None)
        is_refusal = not is_step and slot.task[0]
        faults = outcome.faults
        for fault in faults:
            if is_step:
                part = slice(fault.env_index, fault.env_index + 1)
                write_lost(self._rows, part, fault.status)
                self.metrics.invalid[fault.status] += 1
            is_one = config.vectorized and fault is not faults[0]
            if not (is_refusal or is_one):
                self.metrics.faults[fault.status] += 1
                self._fault_log.env_failed(fault, worker, now)
        if is_step:
            self.metrics.record_step(block.index, now - slot.begun_at, now)
        if outcome.notes:
            outcome = outcome._replace(notes=self._fault_log.warn_once(outcome.notes))
        if faults and not is_step:
            # Its envs have begun anew all the same, each without what it has refused.
            failure = self._fault_log.error_of(faults[0])
            if is_refusal:
                self._fault_log.reset_refused(failure, len(faults), now)
            outcome = Outcome(block.index, error=failure)
        self._end(slot, outcome)

    def _end(self, slot: _BlockSlot, outcome: Outcome) -> None:
        slot.kind = _IDLE
        self.num_running -= 1
        self.outcomes.append(outcome)

    def _lose(self, worker: SupervisedWorker, lost: Lost, now: float) -> None:
        """Marks a worker's blocks lost; what runs on them waits for its successor."""
        if self.state == "starting":
            self._workers.error = self._workers.error or worker.error
            return
        self.metrics.restarts += 1
        self._fault_log.forget(worker)
        text = f"{worker.label} {lost.text}"
        loss = Lost(lost.status, f"{text}{worker.excerpt_note}")
        for slot in self._hosted_by(worker):
            block = slot.block
            for row in block.rows:
                self._workers.incarnations[row] += 1
            if block.index not in self._losses:  # else its episodes have ended before
                self._losses[block.index] = loss
                self.has_new_absent |= slot.kind != _IDLE
                slot.begun_at = now
            # Rows that were answered stay as they are: they may still have to be read.
            slot.keep_last_observation(self._rows)
            if slot.kind and worker.error is not None:
                self._end(slot, Outcome(block.index, error=worker.error))
            elif slot.kind == Kind.CALL:
                error = CallError(f"{text}, during a call")
                self._end(slot, Outcome(block.index, error=error))

    def invalidate_all(
        self, replaced: Sequence[SupervisedWorker], lost: Lost, now: float
    ) -> None:
        """Forgets all that runs, with workers; the rows show what was seen last."""
        for worker in replaced:
            self._lose(worker, lost, now)
        for slot in self._slots:
            if slot.kind == _STEP and slot.has_kept:
                restore_last_observation(self._rows, slot.block.part)
            slot.kind = _IDLE
            slot.worker = self._workers.all[slot.worker.index]
        for outcome in self.outcomes:  # nobody has seen the next episodes
            rows = [fault.env_index for fault in outcome.faults]
            restore_last_observation(self._rows, rows)
        self.num_running, self.likely_last = 0, None
        self.outcomes, self.has_new_absent = [], False

    def release(self) -> None:
        """Lets go of the slab, now that nothing more will happen."""
        del self._fault_log
        self.metrics.slab = None

    def record(self, row: int) -> bytes:
        """Return the repro file of a row; empty if the row does not exist."""
        return self._fault_log.record(row)

    def _hosted_by(self, worker: SupervisedWorker) -> list[_BlockSlot]:
        return [slot for slot in self._slots if slot.worker is worker]


def reset_task(block: Block, reset: Reset) -> Task:
    """Returns what a reset needs; raises what `Reset.check` does."""
    chosen = reset.check(block)
    payload, options, seeds = b"", reset.options, reset.seeds
    if reset.env_indices is not None or seeds is not None or options:
        fields = {"rows": reset.env_indices, "seeds": seeds, "options": options}
        payload = codec.encode(fields)
    return payload, len(chosen) == len(block.rows)
