"""Check every row of a batch against a twin env in this process.

Its envs get the seeds and the actions of the rows: whatever a valid row shows must come
out again, bit for bit. Other rows must be what `BatchEnv` promises of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import gymnasium
import numpy as np

from envserve.client import StepResult
from envserve.envs.seeding import INCARNATIONS_PER_LEASE, env_seed
from envserve.slab import Status

Array = np.ndarray[Any, Any]
Env = gymnasium.Env[Any, Any]
#: Observation, reward, terminated, truncated, final observation.
_Step = tuple[bytes, float, bool, bool, bytes]

#: How often envs are built anew, or leases lost, before a row is seen again.
_FEW: Final = 32


class ReplayCheck:
    """Counts rows of a batch: those that it has checked, and those that are wrong."""

    def __init__(self, make: Callable[[], Env], num_envs: int, root_seed: int) -> None:
        """Makes envs like those of a batch with this root seed."""
        self.num_checked = self.num_wrong = 0
        self._rows = [_Row(make(), root_seed, row) for row in range(num_envs)]

    def reset(self, observation: Array) -> None:
        """Checks the first observations of all rows, `[num_envs, ...]`."""
        for row, seen in zip(self._rows, observation, strict=True):
            self._count(row.begin(seen.tobytes()))

    def step(self, rows: Array, actions: Array, result: StepResult) -> None:
        """Checks what came of rows `[n]`, which were sent these actions `[n, ...]`."""
        columns = (result.reward, result.terminated, result.truncated, result.valid)
        flags = zip(*(column.tolist() for column in columns), strict=True)
        for index, (reward, terminated, truncated, valid) in enumerate(flags):
            shown = result.observation[index].tobytes()
            final = result.final_observation[index].tobytes()
            given = shown, reward, terminated, truncated, final
            status = Status(int(result.status[index]))
            is_right = self._rows[rows[index]].check(given, actions[index], status)
            self._count(is_right and valid == (status == Status.OK))

    def _count(self, is_right: bool) -> None:
        self.num_checked += 1
        self.num_wrong += not is_right


class _Row:
    """A row's twin here, and what is known of both."""

    def __init__(self, twin: Env, root_seed: int, index: int) -> None:
        self._twin, self._root_seed, self._index = twin, root_seed, index
        self._incarnation = -1
        self._owed: Any = None  # the action of the first of its padding rows
        self._ahead: _Step | None = None  # what the next action led to, if looked at

    def begin(self, seen: bytes) -> bool:
        """Finds the incarnation that begins like this; tells whether there is one."""
        self._seen, self._owed, self._ahead = seen, None, None
        for incarnation in self._next_incarnations():
            seed = env_seed(self._root_seed, self._index, incarnation)
            if self._reset(seed) == seen:
                self._incarnation = incarnation
                return True
        return False

    def check(self, given: _Step, action: Any, status: Status) -> bool:
        """Tells whether a row is right."""
        shown, reward, terminated, truncated, final = given
        was_padding, is_late = self._owed is not None, status == Status.LATE
        self._owed = self._owed if was_padding else action
        if status == Status.OK or is_late:
            expected = self._play(self._owed)
            self._seen, self._owed, self._ahead = shown, None, None
            return given == expected and is_late == was_padding
        is_idle = not (reward or terminated)
        if status == Status.PENDING:
            return is_idle and not truncated and self._is_last(shown)
        is_last = self._is_last(final)
        return self.begin(shown) and is_idle and truncated and is_last

    def _is_last(self, shown: bytes) -> bool:
        """Tells whether it was seen last, or is of the action that is owed."""
        return shown == self._seen or shown == self._play(self._owed)[0]

    def _play(self, action: Any) -> _Step:
        """Steps the twin, once for each action."""
        if self._ahead is None:
            observation, reward, terminated, truncated, _ = self._twin.step(action)
            shown = self._bytes(observation)
            final = bytes(len(shown))
            if terminated or truncated:
                shown, final = self._reset(None), shown
            self._ahead = shown, float(reward), bool(terminated), bool(truncated), final
        return self._ahead

    def _reset(self, seed: int | None) -> bytes:
        return self._bytes(self._twin.reset(seed=seed, options=None)[0])

    def _bytes(self, observation: Any) -> bytes:
        return np.asarray(observation, self._twin.observation_space.dtype).tobytes()

    def _next_incarnations(self) -> Iterator[int]:
        above, stride = self._incarnation + 1, INCARNATIONS_PER_LEASE
        leases = range(above // stride + 1, above // stride + 1 + _FEW)
        yield from (above, leases[0] * stride)  # the likeliest ones
        yield from range(above + 1, above + _FEW)
        for lease in leases:
            yield from range(lease * stride, lease * stride + _FEW)
