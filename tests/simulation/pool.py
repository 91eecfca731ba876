"""A pool without processes, whose operations finish when the caller decides.

It satisfies the part of the contract of `envserve.lane` that a server uses. Its
envs are ledger envs, which are stepped when an operation finishes; subclasses may use
other envs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from envserve.envs.seeding import env_seed
from envserve.errors import CallError, EnvError, EnvserveError
from envserve.lane import Call, Fault, Outcome, Reset, make_blocks
from envserve.session.server.decisions import RunCall, RunReset, RunStep
from envserve.settings import PoolSettings
from envserve.slab import Rows, Status, copy_observation_to_final, write_lost
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from tests.oracle.ledger_env import LedgerEnv
from tests.simulation.journal import SimulationJournal, Violation

#: Number of steps in an episode.
LENGTH: Final = 7

_PROBE: Final = LedgerEnv()
SPEC: Final = EnvSpec(
    "envserve/Ledger-v0", _PROBE.observation_space, _PROBE.action_space
)

#: An operation on a block.
Operation = RunStep | Reset | Call


def results_of(call: Call) -> list[list[Any]]:
    """Return the results of a call for its first rows; others count as too large."""
    arguments, _ = codec.decode(call.arguments, max_bytes=len(call.arguments))
    count = 1 + zlib.crc32(call.arguments) % len(call.env_indices)
    return [[row, *arguments] for row in call.env_indices[:count]]


class MemoryPool:
    """The envs of one lease.

    Attributes:
      running: The operation in progress of each busy block, by block index.
      down: Indices of workers that are being replaced.
      is_closing: Whether the pool's envs are gone.
    """

    spec: ClassVar[EnvSpec] = SPEC

    def __init__(
        self, config: PoolSettings, journal: SimulationJournal | None = None
    ) -> None:
        """Create a pool; each env is built by its first reset."""
        self.config = config
        self.blocks = make_blocks(
            *(config.num_envs, config.num_workers, config.num_splits),
            config.blocks_per_split,
        )
        self.parts = [slice(block.start, block.stop) for block in self.blocks]
        self.rows = Rows.allocate(self.spec, config.num_envs)
        self.running: dict[int, Operation] = {}
        self.down: set[int] = set()
        self.is_closing = False
        self._journal = journal or SimulationJournal()
        self._envs: list[LedgerEnv | None] = [None] * config.num_envs
        self._incarnations = [config.first_incarnation] * config.num_envs
        self._lost: dict[int, Status] = {}
        self._used_options: set[tuple[int, bytes]] = set()

    @property
    def absent(self) -> set[int]:
        return self.running.keys() & self._lost.keys()

    # Operations.

    def begin(
        self, decision: RunStep | RunReset | RunCall
    ) -> list[tuple[int, Operation]]:
        if self.is_closing:
            raise Violation(f"{self!r} was used after it was closed")
        begun: list[tuple[int, Operation]]
        if isinstance(decision, RunStep):
            begun = [(block, decision) for block in decision.blocks]
        elif isinstance(decision, RunReset):
            begun = [(reset.block, reset) for reset in decision.resets]
        else:
            begun = [(call.block, call) for call in decision.calls]
        for block, operation in begun:
            self._begin(block, operation)
        return begun

    def _begin(self, block: int, operation: Operation) -> None:
        if block in self.running:
            raise Violation(f"block {block} was used while it was running")
        self.running[block] = operation
        if isinstance(operation, Call):
            self._record_call(operation)
        elif isinstance(operation, Reset) and operation.options:
            self._record_options(block, operation.options)
        elif isinstance(operation, RunStep) and block in self._lost:
            copy_observation_to_final(self.rows, self.parts[block])

    def _record_call(self, call: Call) -> None:
        for row, number in results_of(call):
            self._journal.record_call(number, self.config.first_env_index + row)

    def _record_options(self, block: int, options: bytes) -> None:
        if (block, options) in self._used_options:
            raise Violation(f"block {block} was reset twice with the same options")
        self._used_options.add((block, options))

    def finish(self, block: int, num_errors: int = 0) -> Outcome:
        """Finish an operation; the first `num_errors` rows of a step fail."""
        operation = self.running.pop(block)
        if isinstance(operation, Call):
            return Outcome(block, result=codec.encode(results_of(operation)))
        if isinstance(operation, Reset):
            return self._finish_reset(operation)
        if block in self._lost:
            return self._finish_lost(block)
        faults, infos = [], {}
        part = self.parts[block]
        for row in range(part.start, part.stop):
            if row < part.start + num_errors:
                faults.append(self._end_with_error(row))
            elif info := self._step(row):
                infos[row] = info
        return Outcome(block, faults=faults, infos=infos)

    def fail(self, block: int) -> Outcome:
        """Let a whole operation fail; the episodes of a step or reset are lost."""
        operation = self.running.pop(block)
        if isinstance(operation, Call):
            error: EnvserveError = CallError("the call failed", env_index=0)
        else:
            error = EnvError("the env failed", env_index=None)
            self._mark_lost(block, Status.WORKER_DIED)
        return Outcome(block, error=error)

    # Rows.

    def _reset(self, row: int, seed: int | None = None, options: bytes = b"") -> Any:
        """Start an episode; return its info if there are options."""
        env = self._envs[row]
        if env is None:
            env = self._envs[row] = LedgerEnv(length=LENGTH, journal=self._journal)
            if seed is None:
                index = self.config.first_env_index + row
                seed = env_seed(self.config.seed, index, self._incarnations[row])
        decoded = codec.decode(options) if options else None
        observation, info = env.reset(seed=seed, options=decoded)
        self._journal.pools[int(observation[0])] = self
        self.rows.observation[0][row] = observation
        return info if options else None

    def _step(self, row: int) -> Any:
        """Step an env, and reset it if its episode ends; return the final info."""
        env, rows = self._envs[row], self.rows
        if env is None:
            raise Violation(f"row {row} of {self!r} was stepped before its reset")
        observation, reward, terminated, truncated, info = env.step(rows.action[0][row])
        rows.observation[0][row] = observation
        rows.reward[row] = reward
        rows.terminated[row], rows.truncated[row] = terminated, truncated
        rows.status[row] = Status.OK
        if not (terminated or truncated):
            return None
        rows.final_observation[0][row] = observation
        self._reset(row)
        return info

    def _end_with_error(self, row: int) -> Fault:
        self._rebuild(row)
        part = slice(row, row + 1)
        copy_observation_to_final(self.rows, part)
        write_lost(self.rows, part, Status.ENV_ERROR)
        self._reset(row)
        return Fault(row, Status.ENV_ERROR, "the env raised")

    def _finish_reset(self, reset: Reset) -> Outcome:
        part, rows = self.parts[reset.block], self.rows
        whole = range(part.start, part.stop)
        chosen: Sequence[int] = (
            whole if reset.env_indices is None else reset.env_indices
        )
        seeds = reset.seeds or [None] * len(chosen)
        infos = {}
        for row, seed in zip(chosen, seeds, strict=True):
            if info := self._reset(row, seed, reset.options):
                infos[row] = info
            rows.reward[row], rows.status[row] = 0.0, Status.OK
            rows.terminated[row] = rows.truncated[row] = False
        if len(chosen) == len(whole):
            self._lost.pop(reset.block, None)
        return Outcome(reset.block, infos=infos)

    def _finish_lost(self, block: int) -> Outcome:
        """Finish a step of a lost block with rows that report the loss."""
        part, status = self.parts[block], self._lost.pop(block)
        write_lost(self.rows, part, status)
        faults = []
        for row in range(part.start, part.stop):
            self._reset(row)
            faults.append(Fault(row, status, "the worker ended"))
        return Outcome(block, faults=faults)

    # Losses.

    def lose_worker(
        self, worker: int, status: Status, *, applied: bool
    ) -> list[Outcome]:
        """Lose all episodes of a worker; return the outcomes of its calls, which fail.

        Args:
          applied: Whether the worker had applied its running step when it was lost.
        """
        self.down.add(worker)
        ended = []
        for block in self.blocks:
            if block.worker != worker:
                continue
            operation = self.running.get(block.index)
            if isinstance(operation, Call):
                ended.append(self.fail(block.index))
            elif isinstance(operation, RunStep) and block.index not in self._lost:
                if applied:
                    self._apply(block.index)
                copy_observation_to_final(self.rows, self.parts[block.index])
            self._mark_lost(block.index, status)
        return ended

    def end(self, *, applied: bool) -> None:
        """Lose all envs; with `applied`, apply the running steps first."""
        if self.is_closing:
            return
        self.is_closing = True
        for block, operation in self.running.items():
            if applied and isinstance(operation, RunStep) and block not in self._lost:
                self._apply(block)
        for row in range(len(self._envs)):
            self._rebuild(row)

    def close(self) -> None:
        self.end(applied=False)

    def _apply(self, block: int) -> None:
        for row in range(self.parts[block].start, self.parts[block].stop):
            self._step(row)

    def _mark_lost(self, block: int, status: Status) -> None:
        self._lost.setdefault(block, status)
        for row in range(self.parts[block].start, self.parts[block].stop):
            self._rebuild(row)

    def _rebuild(self, row: int) -> None:
        if self._envs[row] is not None:
            self._journal.num_lost += 1
        self._envs[row] = None
        self._incarnations[row] += 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of seed {self.config.seed}>"
