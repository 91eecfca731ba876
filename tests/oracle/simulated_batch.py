"""Ledger envs in this process, and the results that a real batch would return."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from envserve.client import StepResult
from envserve.envs.seeding import env_seed
from envserve.slab import Status
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger
from tests.oracle.ledger_env import LedgerEnv

ROOT_SEED = 5
#: Number of steps in an episode of a `CheckedRun`.
LENGTH = 3


class SimulatedBatch:
    """Steps envs, and produces results with the specified faults.

    Rows that are `in_flight` apply their action and return PENDING; a later step with
    these rows as `late` returns the result.
    """

    def __init__(
        self, num_envs: int = 3, *, autoreset: str = "same_step", **options: Any
    ) -> None:
        self.num_envs = num_envs
        self._autoreset = autoreset
        self._options = options
        self._envs = [LedgerEnv(**options) for _ in range(num_envs)]
        self._incarnations = [0] * num_envs
        self._has_ended = [False] * num_envs
        self._is_new = [False] * num_envs
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self.observation = np.zeros((num_envs, 4), np.int64)

    def reset(self) -> Array:
        for row in range(self.num_envs):
            self.observation[row] = self._fresh(row)
        return self.observation.copy()

    def reset_row(self, row: int) -> Array:
        self._has_ended[row] = self._is_new[row] = False
        self.observation[row] = self._envs[row].reset()[0]
        return self.observation[[row]]

    def step(
        self,
        actions: Array,
        *,
        lost: Mapping[int, Status] | None = None,
        pending: Collection[int] = (),
        in_flight: Collection[int] = (),
        late: Collection[int] = (),
    ) -> StepResult:
        n = self.num_envs
        lost = lost or {}
        status = np.zeros(n, np.uint8)
        reward = np.zeros(n)
        terminated, truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        final = np.zeros_like(self.observation)
        for row in range(n):
            if row in lost:
                status[row], truncated[row] = lost[row], True
                final[row] = self.observation[row]
                self._envs[row] = LedgerEnv(**self._options)
                self._incarnations[row] += 1
                self._waiting.pop(row, None)
                self._has_ended[row] = False
                if self._autoreset == "next_step":
                    self._is_new[row] = True
                else:
                    self.observation[row] = self._fresh(row)
                continue
            if row in in_flight:
                self._waiting[row] = self._apply(row, int(actions[row]))
            if row in pending or row in in_flight:
                status[row] = Status.PENDING
                continue
            if row in late:
                status[row] = Status.LATE
                outcome = self._waiting.pop(row)
            else:
                outcome = self._apply(row, int(actions[row]))
            self.observation[row], final[row], *others = outcome
            reward[row], terminated[row], truncated[row] = others
        return StepResult(
            self.observation.copy(),
            reward,
            terminated,
            truncated,
            status == Status.OK,
            final,
            status,
            {},
        )

    def _fresh(self, row: int) -> Array:
        seed = env_seed(ROOT_SEED, row, self._incarnations[row])
        return self._envs[row].reset(seed=seed)[0]

    def _apply(self, row: int, action: int) -> tuple[Any, ...]:
        """Return observation, final observation, reward, terminated, truncated."""
        env = self._envs[row]
        zeros = np.zeros(4, np.int64)
        if self._is_new[row]:
            self._is_new[row] = False
            return self._fresh(row), zeros, 0.0, False, False
        if self._has_ended[row]:
            self._has_ended[row] = False
            return env.reset()[0], zeros, 0.0, False, False
        observation, reward, terminated, truncated, _ = env.step(np.int64(action))
        if not (terminated or truncated):
            return observation, zeros, reward, False, False
        if self._autoreset == "same_step":
            return env.reset()[0], observation, reward, terminated, truncated
        self._has_ended[row] = True
        return observation, observation, reward, terminated, truncated


class CheckedRun:
    """A simulated batch together with a ledger that verifies its results."""

    def __init__(self, random_seed: int = 0, **options: Any) -> None:
        self.batch = SimulatedBatch(length=LENGTH, **options)
        self.ledger = Ledger(
            self.batch.num_envs,
            ROOT_SEED,
            length=LENGTH,
            autoreset=options.get("autoreset", "same_step"),
        )
        self.random = np.random.default_rng(random_seed)
        self.ledger.reset(self.batch.reset())

    def draw_actions(self) -> Array:
        return self.random.integers(0, 1000, self.batch.num_envs)

    def make_result(self, **faults: Any) -> tuple[Array, StepResult]:
        """Return random actions and the unverified result of a step with them."""
        actions = self.draw_actions()
        return actions, self.batch.step(actions, **faults)

    def step(self, **faults: Any) -> StepResult:
        actions, result = self.make_result(**faults)
        self.ledger.step(actions, result)
        return result

    def interrupt(self, *, is_applied: bool = True, **faults: Any) -> None:
        """Simulate an interrupt: discard the result of a step, or do not step."""
        actions = self.draw_actions()
        if is_applied:
            self.batch.step(actions, **faults)
        self.ledger.mark_unanswered(actions)

    def check_rows(self, actions: Array, result: StepResult, *rows: int) -> None:
        """Pass some rows of a result to the ledger."""
        chosen = list(rows)
        part = StepResult._make([*(array[chosen] for array in result[:-1]), {}])
        self.ledger.step(actions[chosen], part, chosen)
