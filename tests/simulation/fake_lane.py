"""A lane with in-process envs and random faults.

It satisfies the contract of `envserve.lane.Lane`, never blocks, and uses every freedom
that the contract allows: blocks finish in any order, are absent for any time, and are
lost while idle or in flight, because a worker or a server fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from envserve.errors import EnvserveError
from envserve.lane import Call, Outcome, Reset, mark_harmless
from envserve.session.server.decisions import RunStep
from envserve.settings import PoolSettings
from envserve.slab import Status, copy_observation_to_final
from envserve.spaces.env_spec import EnvSpec
from tests.simulation.pool import MemoryPool

SPEC = EnvSpec("Fake-v0", spaces.Box(0, 2**40, (3,), np.int64), spaces.Discrete(1000))


def next_hash(before: int, action: int) -> int:
    return (before * 31 + action + 7) % 1_000_003


@dataclass(slots=True)
class Faults:
    """Fault probabilities, per block and call of `collect`."""

    end: float = 0.6  # a running operation finishes
    lose: float = 0.0  # the envs are lost
    silence: float = 0.0  # the server stops replying
    interrupt_waiting: float = 0.0  # KeyboardInterrupt
    draw: Callable[[], float] = field(default=lambda: 0.5)


class FakeLane(MemoryPool):
    """Implements `envserve.lane.Lane` in memory.

    Attributes:
      state: int64 `[num_envs, 3]`; the true episode, step and hash of each env.
      losses: Number of losses of each block.
    """

    give_up_error: EnvserveError | None = None
    spec = SPEC

    def __init__(self, num_envs: int, num_workers: int, faults: Faults) -> None:
        settings = PoolSettings(
            env_name="Fake-v0",
            num_envs=num_envs,
            num_workers=num_workers,
            num_splits=2,
            seed=0,
        )
        super().__init__(settings)
        self.name = "fake"
        self.num_envs = num_envs
        self.state = np.zeros((num_envs, 3), np.int64)
        self.state[:, 0] = -1
        self.losses = dict.fromkeys(range(len(self.blocks)), 0)
        self.faults = faults
        self._actions = np.zeros(num_envs, np.int64)
        self._silent: set[int] = set()
        self._outcomes: list[Outcome] = []
        self._reader, self._writer = os.pipe()
        os.write(self._writer, b"!")  # always readable

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self._outcomes)

    @property
    def absent(self) -> set[int]:
        return super().absent | self._silent

    def finish_start(self, deadline: float) -> None:
        pass

    def submit_step(self, blocks: Sequence[int]) -> None:
        for index in blocks:
            part = self.parts[index]
            self._actions[part] = self.rows.action[0][part]
            self._begin(index, RunStep(("", 0), [index]))

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        for reset in resets:
            self._begin(reset.block, reset)

    def submit_call(self, calls: Sequence[Call]) -> None:
        for call in calls:
            assert call.block not in self.running, "a block in flight was submitted"
            self.running[call.block] = call

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        if self.faults.draw() < self.faults.interrupt_waiting:
            interrupt = KeyboardInterrupt()
            mark_harmless(interrupt)
            raise interrupt
        self._advance()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _advance(self) -> None:
        draw, faults = self.faults.draw, self.faults
        self._outcomes += self.end_after_giving_up()
        for index, part in enumerate(self.parts):
            if draw() < faults.lose:
                self._lose(index)
            if index not in self.running:
                continue
            if draw() < faults.silence:
                if isinstance(self.running[index], RunStep):
                    copy_observation_to_final(self.rows, part)
                self._silent.add(index)
            elif index in self._silent:
                if draw() >= 0.7:
                    self._silent.discard(index)
            elif draw() < faults.end:
                self._outcomes.append(self.finish(index))

    def end_after_giving_up(self) -> list[Outcome]:
        """End resets and calls if the lane has given up; see `Lane.give_up_error`."""
        outcomes = []
        for index, operation in list(self.running.items()):
            if self.give_up_error is not None and not isinstance(operation, RunStep):
                error = self.give_up_error if isinstance(operation, Call) else None
                outcomes.append(Outcome(index, error=error))
                del self.running[index]
        return outcomes

    def _lose(self, index: int) -> None:
        if index not in self._lost:
            self.losses[index] += 1
            if isinstance(self.running.get(index), RunStep):
                copy_observation_to_final(self.rows, self.parts[index])
        if isinstance(self.running.get(index), Call):
            self._silent.discard(index)
            self._outcomes.append(self.fail(index))
        self._mark_lost(index, Status.WORKER_DIED)

    def _reset(self, row: int, seed: int | None = None, options: bytes = b"") -> None:
        self.state[row] = (self.state[row, 0] + 1, 0, 0)
        self.rows.observation[0][row] = self.state[row]

    def _step(self, row: int) -> None:
        action = self._actions[row]
        self.state[row, 1] += 1
        self.state[row, 2] = next_hash(int(self.state[row, 2]), int(action))
        self.rows.observation[0][row] = self.state[row]
        self.rows.reward[row], self.rows.status[row] = action, Status.OK
        self.rows.terminated[row] = self.rows.truncated[row] = False

    def invalidate(self, text: str) -> None:
        self.running.clear()
        self._silent.clear()
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
