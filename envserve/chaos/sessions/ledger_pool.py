"""A pool whose envs are made up: operations end, and workers are lost, when told so.

It behaves as `envserve.pool` does, rows and statuses included, and tells the ledger
of everything that its envs do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from envserve import codec
from envserve.chaos.sessions.ledger import (
    SPEC,
    Ledger,
    Observation,
    Violation,
    apply,
    endings,
    first_observation,
)
from envserve.errors import CallError, EnvError, EnvserveError
from envserve.lane import Call, Fault, Outcome, PoolConfig, Reset, make_blocks
from envserve.session import RunCall, RunReset, RunStep
from envserve.slab import Rows, Status, keep_last_observation, write_lost, write_pending

__all__ = ["LedgerPool", "Running"]

_NO_EPISODE: Final[Observation] = [0, 0, 0]


@dataclass(slots=True)
class Running:
    """An operation of a block.

    Attributes:
      number: No other operation of the pool has it.
      block: Index of the block.
      kind: What it is: a reset, a call, or None for a step.
      actions: Of a step, one per row; None if the episodes were lost before it.
      is_alone: Whether it waits for a lost worker.
    """

    number: int
    block: int
    kind: Reset | Call | None = None
    actions: list[int] | None = None
    is_alone: bool = False


@dataclass(repr=False)
class LedgerPool:
    """Envs of one lease.

    Attributes:
      number: No other pool has it.
      running: Operation by block.
      down: Workers that are being replaced.
    """

    number: int
    config: PoolConfig
    ledger: Ledger
    running: dict[int, Running] = field(default_factory=dict)
    down: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Builds the envs; none has an episode before its first reset."""
        config = self.config
        self.blocks = make_blocks(
            config.num_envs, config.num_workers, config.num_splits
        )
        self.rows = Rows.allocate(SPEC, config.num_envs)
        self.is_closing = False
        self._parts = [slice(block.start, block.stop) for block in self.blocks]
        self._states = [_NO_EPISODE] * config.num_envs
        self._incarnations = [config.first_incarnation] * config.num_envs
        self._is_new = [True] * config.num_envs
        self._lost: dict[int, Status] = {}
        self._num_operations = 0

    def __repr__(self) -> str:
        return f"<LedgerPool {self.number}>"

    # Operations.

    def begin(self, decision: RunStep | RunReset | RunCall) -> list[Running]:
        """Begins what a session has decided, and returns the operations."""
        if self.is_closing:
            raise Violation(f"pool {self.number} was used after its end")
        if isinstance(decision, RunStep):
            return [
                self._begin_step(block, decision.is_alone) for block in decision.blocks
            ]
        if isinstance(decision, RunReset):
            return [self._begin(reset.block, reset) for reset in decision.resets]
        row = decision.call.env_index
        block = next(b.index for b in self.blocks if row < b.stop)
        self.ledger.note_call(decision.call.arguments[0])
        return [self._begin(block, decision.call)]

    def _begin(self, block: int, kind: Reset | Call | None) -> Running:
        if block in self.running:
            raise Violation(f"block {block} was used while it was running")
        self._num_operations += 1
        self.running[block] = Running(self._num_operations, block, kind)
        return self.running[block]

    def _begin_step(self, block: int, is_alone: bool) -> Running:
        running = self._begin(block, None)
        running.is_alone = is_alone
        if block not in self._lost:
            part = self._parts[block]
            running.actions = self.rows.action[0][part].tolist()
            for action, state in zip(running.actions, self._states[part], strict=True):
                self.ledger.note_step(state, action)
        return running

    def finish(self, block: int, num_errors: int = 0) -> Outcome:
        """Ends an operation; so many rows of a step fail."""
        running = self.running.pop(block)
        if isinstance(running.kind, Call):
            call = running.kind
            result = codec.encode([call.env_index, *call.arguments])
            return Outcome(block, result=result)
        if isinstance(running.kind, Reset):
            return self._finish_reset(running.kind)
        if block in self._lost:
            return self._finish_lost(block)
        if running.actions is None:
            raise Violation(f"block {block} found its episodes again")
        return self._finish_step(block, running.actions, num_errors)

    def fail(self, block: int) -> Outcome:
        """Ends an operation that has failed as a whole; its episodes are lost."""
        running = self.running.pop(block)
        if isinstance(running.kind, Call):
            error: EnvserveError = CallError("the call failed", env_index=0)
            return Outcome(block, error=error)
        self._mark_lost(block, Status.WORKER_DIED)
        return Outcome(block, error=EnvError("the env failed", env_index=None))

    def pad(self, block: int) -> Outcome:
        """Ends a step whose worker is not back yet."""
        del self.running[block]
        write_pending(self.rows, self._parts[block])
        return Outcome(block, is_padding=True)

    # Workers.

    def lose_worker(self, worker: int, status: Status) -> list[Outcome]:
        """Loses all episodes of a worker; returns the calls that end with it."""
        self.down.add(worker)
        ended = []
        for block in self.blocks:
            if block.worker != worker:
                continue
            self._mark_lost(block.index, status)
            running = self.running.get(block.index)
            if running is not None and isinstance(running.kind, Call):
                ended.append(self.fail(block.index))
        return ended

    def _mark_lost(self, block: int, status: Status) -> None:
        self._lost[block] = status
        part = self._parts[block]
        for row in range(part.start, part.stop):
            self._rebuild(row)

    def lose_all(self) -> None:
        """Loses all episodes, since the pool ends."""
        self.is_closing = True
        self.ledger.end_pool(self.number)
        for state in self._states:
            if state is not _NO_EPISODE:
                self.ledger.lose(state[0])

    def _rebuild(self, row: int) -> None:
        if self._states[row] is not _NO_EPISODE:
            self.ledger.lose(self._states[row][0])
        self._states[row] = _NO_EPISODE
        self._incarnations[row] += 1
        self._is_new[row] = True

    # Rows.

    def _new_state(self, row: int) -> Observation:
        """Begins an episode."""
        seed = self.config.seed
        if self._is_new[row]:
            self._is_new[row] = False
            self.ledger.note_incarnation(seed, row, self._incarnations[row])
        state = first_observation(self.ledger.new_episode(self.number, seed, row))
        self._states[row] = state
        return state

    def _finish_step(self, block: int, actions: list[int], num_errors: int) -> Outcome:
        part, rows = self._parts[block], self.rows
        last_states = self._states[part]
        states = [
            apply(state, action)
            for state, action in zip(last_states, actions, strict=True)
        ]
        self._states[part] = states
        flags = [endings(state) for state in states]
        rows.reward[part] = actions
        rows.observation[0][part] = states
        rows.terminated[part] = [is_terminated for is_terminated, _ in flags]
        rows.truncated[part] = [is_truncated for _, is_truncated in flags]
        rows.status[part] = Status.OK
        faults, infos = [], {}
        for row, last, (is_terminated, is_truncated) in zip(
            range(part.start, part.stop), last_states, flags, strict=True
        ):
            if row < part.start + num_errors:
                faults.append(self._end_with_error(row, last))
            elif is_terminated or is_truncated:
                infos[row] = {"episode": last[0]}
                rows.final_observation[0][row] = rows.observation[0][row]
                rows.observation[0][row] = self._new_state(row)
        return Outcome(block, faults=faults, infos=infos)

    def _end_with_error(self, row: int, last: Observation) -> Fault:
        self._rebuild(row)
        write_lost(self.rows, slice(row, row + 1), Status.ENV_ERROR)
        self.rows.final_observation[0][row] = last
        self.rows.observation[0][row] = self._new_state(row)
        return Fault(row, Status.ENV_ERROR, "the env raised")

    def _finish_lost(self, block: int) -> Outcome:
        """Ends a step with the one row that a lost episode costs."""
        part, status = self._parts[block], self._lost.pop(block)
        keep_last_observation(self.rows, part)
        write_lost(self.rows, part, status)
        faults = []
        for row in range(part.start, part.stop):
            if self._states[row] is not _NO_EPISODE:  # one of a reset in between
                self.ledger.lose(self._states[row][0])
            self.rows.observation[0][row] = self._new_state(row)
            faults.append(Fault(row, status, "the worker ended"))
        return Outcome(block, faults=faults)

    def _finish_reset(self, reset: Reset) -> Outcome:
        part = self._parts[reset.block]
        whole = range(part.start, part.stop)
        chosen = whole if reset.env_indices is None else reset.env_indices
        for row in chosen:
            self.rows.observation[0][row] = self._new_state(row)
        if len(chosen) == len(whole):
            self._lost.pop(reset.block, None)
        self.rows.reward[part] = 0.0
        self.rows.terminated[part] = self.rows.truncated[part] = False
        self.rows.status[part] = Status.OK
        return Outcome(reset.block)
