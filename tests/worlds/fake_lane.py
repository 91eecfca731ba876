"""A lane whose envs are ledgers in this process, and whose faults are drawn at random.

It keeps the contract of `envserve.lane.Lane`, never waits, and is as unkind as the
contract allows: blocks end in any order, are absent for any time, and are lost while
idle or in flight, by worker or by server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from envserve import codec
from envserve.errors import EnvserveError
from envserve.lane import Call, Fault, Outcome, Reset, make_blocks
from envserve.slab import Rows, Status, keep_last_observation, write_lost
from envserve.spec import EnvSpec

SPEC = EnvSpec(
    "Fake-v0",
    spaces.Box(0, 2**40, (3,), np.int64),
    spaces.Discrete(1000),
)


def next_hash(before: int, action: int) -> int:
    """Returns what an env observes after an action."""
    return (before * 31 + action + 7) % 1_000_003


@dataclass(slots=True)
class _Operation:
    """What runs on a block; `is_lost_step` has nothing but the lost row to give."""

    kind: str
    rows: Sequence[int] = ()
    actions: Sequence[int] = ()
    is_lost_step: bool = False
    is_silent: bool = False


@dataclass(slots=True)
class Faults:
    """Chances, for each block and call of `collect`, that something happens."""

    end: float = 0.6  # an operation ends
    lose: float = 0.0  # the envs are lost
    silence: float = 0.0  # the server falls silent
    interrupt_waiting: float = 0.0  # Ctrl-C
    draw: Callable[[], float] = field(default=lambda: 0.5)


class FakeLane:
    """Satisfies `envserve.lane.Lane`.

    Attributes:
      state: Per row its episode, step and hash, as they really are.
      losses: How often each block was lost.
      faults: What may happen.
    """

    given_up: EnvserveError | None = None
    spec = SPEC

    def __init__(self, num_envs: int, num_workers: int, faults: Faults) -> None:
        self.name = "fake"
        self.num_envs = num_envs
        self.blocks = make_blocks(num_envs, num_workers, 2)
        self.rows = Rows.allocate(SPEC, num_envs)
        self.state = np.zeros((num_envs, 3), np.int64)
        self.state[:, 0] = -1
        self.losses = dict.fromkeys(range(len(self.blocks)), 0)
        self.faults = faults
        self.is_waiting = False
        self._operations: dict[int, _Operation] = {}
        self._lost: dict[int, Status] = {}
        self._outcomes: list[Outcome] = []
        self._has_news = False
        self._reader, self._writer = os.pipe()
        os.write(self._writer, b"!")  # always readable

    @property
    def is_busy(self) -> bool:
        return bool(self._operations or self._outcomes)

    @property
    def absent(self) -> set[int]:
        return {
            index
            for index, operation in self._operations.items()
            if operation.is_silent or index in self._lost
        }

    def finish_start(self, deadline: float) -> None:
        pass

    def submit_step(self, blocks: Sequence[int]) -> None:
        for index in blocks:
            actions = self.rows.action[0][self._part(index)].tolist()
            operation = _Operation("step", actions=actions)
            self._submit(index, operation)
            if index in self._lost:
                operation.is_lost_step = True
                keep_last_observation(self.rows, self._part(index))

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        for reset in resets:
            block = self.blocks[reset.block]
            rows = reset.env_indices or range(block.start, block.stop)
            self._submit(reset.block, _Operation("reset", rows=rows))

    def submit_call(self, call: Call) -> None:
        index = next(b.index for b in self.blocks if call.env_index < b.stop)
        self._submit(index, _Operation("call"))

    def _submit(self, index: int, operation: _Operation) -> None:
        assert index not in self._operations, "a block in flight was submitted"
        self._operations[index] = operation
        self._has_news = self._has_news or index in self._lost

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        self.is_waiting = True
        if self.faults.draw() < self.faults.interrupt_waiting:
            raise KeyboardInterrupt
        self.is_waiting = False
        self._go_on()
        outcomes, self._outcomes = self._outcomes, []
        self._has_news = False
        return outcomes

    def _go_on(self) -> None:
        draw, faults = self.faults.draw, self.faults
        for block in self.blocks:
            if draw() < faults.lose:
                self._lose(block.index)
            operation = self._operations.get(block.index)
            if operation is None:
                continue
            if draw() < faults.silence:
                if not operation.is_silent and operation.kind == "step":
                    keep_last_observation(self.rows, self._part(block.index))
                operation.is_silent = True
            elif operation.is_silent:
                operation.is_silent = draw() < 0.7
            elif draw() < faults.end:
                self._end(block.index, operation)

    def _lose(self, index: int) -> None:
        operation = self._operations.get(index)
        if index not in self._lost:
            self.losses[index] += 1
            self._lost[index] = Status.WORKER_DIED
        if operation is not None and operation.kind == "call":
            del self._operations[index]
            error = EnvserveError("lost during a call")
            self._outcomes.append(Outcome(index, error=error))
        elif operation is not None and operation.kind == "step":
            if not operation.is_lost_step and not operation.is_silent:
                keep_last_observation(self.rows, self._part(index))
            operation.is_lost_step = True

    def _end(self, index: int, operation: _Operation) -> None:
        del self._operations[index]
        block, part = self.blocks[index], self._part(index)
        rows = range(block.start, block.stop)
        faults: list[Fault] = []
        if operation.is_lost_step:
            self._begin_episodes(rows)
            self._write(rows, [0] * len(rows))
            write_lost(self.rows, part, self._lost.pop(index))
            faults = [Fault(row, Status.WORKER_DIED, "was lost") for row in rows]
        elif operation.kind == "reset":
            self._begin_episodes(operation.rows)
            self._write(operation.rows, [0] * len(operation.rows))
            if len(operation.rows) == len(rows):
                self._lost.pop(index, None)
        elif operation.kind == "step":
            for row, action in zip(rows, operation.actions, strict=True):
                self.state[row, 1] += 1
                self.state[row, 2] = next_hash(int(self.state[row, 2]), action)
            self._write(rows, operation.actions)
        result = codec.encode({"value": None}) if operation.kind == "call" else b""
        self._outcomes.append(Outcome(index, faults=faults, result=result))

    def _begin_episodes(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.state[row] = (self.state[row, 0] + 1, 0, 0)

    def _write(self, rows: Sequence[int], rewards: Sequence[int]) -> None:
        chosen = list(rows)
        self.rows.observation[0][chosen] = self.state[chosen]
        self.rows.reward[chosen] = rewards
        self.rows.terminated[chosen] = self.rows.truncated[chosen] = False
        self.rows.status[chosen] = Status.OK

    def _part(self, index: int) -> slice:
        return slice(self.blocks[index].start, self.blocks[index].stop)

    def lose(self, text: str) -> None:
        self._operations = {}
        self._outcomes = []
        for block in self.blocks:
            self._lose(block.index)

    def stats(self) -> dict[str, int]:
        return {}

    def fileno(self) -> int:
        return self._reader

    def begin_close(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
