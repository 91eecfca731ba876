"""Check every row of a batch against a twin env in this process.

The twins get the same seeds and actions as the envs of the batch. Each valid row must
equal the result of its twin bit for bit, and each invalid row must have the values that
`BatchEnv` guarantees for its status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import gymnasium
import numpy as np

from envserve.client import StepResult
from envserve.envs.seeding import INCARNATIONS_PER_LEASE, env_seed
from envserve.slab import Array, Status

Env = gymnasium.Env[Any, Any]
#: Observation, reward, terminated, truncated, final observation.
_Step = tuple[bytes, float, bool, bool, bytes]

#: Maximum number of incarnations, or of leases, that a row skips between two results.
_MAX_SKIPPED: Final = 32


class ReplayCheck:
    """Checks the results of a batch.

    Attributes:
      num_checked: Number of rows checked so far.
      num_wrong: Number of wrong rows among them.
    """

    def __init__(self, make: Callable[[], Env], num_envs: int, root_seed: int) -> None:
        """Make the twin envs; `root_seed` is the seed of the batch."""
        self.num_checked = self.num_wrong = 0
        self._rows = [_Row(make(), root_seed, row) for row in range(num_envs)]

    def reset(self, observation: Array) -> None:
        """Check the first observations of all rows, `[num_envs, ...]`."""
        for row, first in zip(self._rows, observation, strict=True):
            self._count(row.find_incarnation(first.tobytes()))

    def step(self, rows: Array, actions: Array, result: StepResult) -> None:
        """Check the results of rows `[n]` that were sent these actions `[n, ...]`."""
        columns = (result.reward, result.terminated, result.truncated, result.valid)
        flags = zip(*(column.tolist() for column in columns), strict=True)
        for index, (reward, terminated, truncated, valid) in enumerate(flags):
            observation = result.observation[index].tobytes()
            final = result.final_observation[index].tobytes()
            received = observation, reward, terminated, truncated, final
            status = Status(int(result.status[index]))
            is_correct = self._rows[rows[index]].check(received, actions[index], status)
            self._count(is_correct and valid == (status == Status.OK))

    def _count(self, is_correct: bool) -> None:
        self.num_checked += 1
        self.num_wrong += not is_correct


class _Row:
    """One row of the batch, and its twin env."""

    def __init__(self, twin: Env, root_seed: int, index: int) -> None:
        self._twin, self._root_seed, self._index = twin, root_seed, index
        self._incarnation = -1
        #: The action whose result is missing while the row is padding, otherwise None.
        self._pending: Any = None
        #: The twin's result of the pending action; None until the twin has taken it.
        self._next: _Step | None = None

    def find_incarnation(self, first: bytes) -> bool:
        """Find the incarnation with this first observation; return whether it exists.

        If it does, the twin has been reset with the seed of this incarnation.
        """
        self._last, self._pending, self._next = first, None, None
        for incarnation in self._next_incarnations():
            seed = env_seed(self._root_seed, self._index, incarnation)
            if self._reset(seed) == first:
                self._incarnation = incarnation
                return True
        return False

    def check(self, received: _Step, action: Any, status: Status) -> bool:
        """Step the twin if necessary; return whether the received row is correct."""
        observation, reward, terminated, truncated, final = received
        was_padding, is_late = self._pending is not None, status == Status.LATE
        self._pending = self._pending if was_padding else action
        if status == Status.OK or is_late:
            expected = self._step_twin(self._pending)
            self._last, self._pending, self._next = observation, None, None
            return received == expected and is_late == was_padding
        is_idle = not (reward or terminated)
        if status == Status.PENDING:
            return is_idle and not truncated and self._is_current(observation)
        is_last = self._is_current(final)
        return self.find_incarnation(observation) and is_idle and truncated and is_last

    def _is_current(self, shown: bytes) -> bool:
        """Return whether an observation is that before or after the pending action."""
        return shown == self._last or shown == self._step_twin(self._pending)[0]

    def _step_twin(self, action: Any) -> _Step:
        """Step the twin, unless it has taken this action already; return the result."""
        if self._next is None:
            observation, reward, terminated, truncated, _ = self._twin.step(action)
            first = self._bytes(observation)
            final = bytes(len(first))
            if terminated or truncated:
                first, final = self._reset(None), first
            self._next = first, float(reward), bool(terminated), bool(truncated), final
        return self._next

    def _reset(self, seed: int | None) -> bytes:
        return self._bytes(self._twin.reset(seed=seed, options=None)[0])

    def _bytes(self, observation: Any) -> bytes:
        return np.asarray(observation, self._twin.observation_space.dtype).tobytes()

    def _next_incarnations(self) -> Iterator[int]:
        start, stride = self._incarnation + 1, INCARNATIONS_PER_LEASE
        leases = range(start // stride + 1, start // stride + 1 + _MAX_SKIPPED)
        yield from (start, leases[0] * stride)  # the most likely candidates
        yield from range(start + 1, start + _MAX_SKIPPED)
        for lease in leases:
            yield from range(lease * stride, lease * stride + _MAX_SKIPPED)
