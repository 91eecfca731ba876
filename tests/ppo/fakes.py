"""Fake batches of envs with predictable results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import gymnasium
import numpy as np

from envserve.client import BatchEnv, BatchStats, StepResult
from envserve.errors import ActionError
from envserve.slab import Status
from ppo.in_graph_batch_env import InGraphBatchEnv

BOX = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class CountingBatchEnv:
    """Fake `BatchEnv`; env b observes (b, number of steps in the current episode).

    Every reward is 1.

    Args:
      lengths: Number of steps in the episodes of each env.
      terminates: Whether the episodes of each env end by termination; by default
        they end by truncation.
      lost: Pairs (batch step, b) at which the step and its episode are lost.
      action_space: Action space of one env.
      observation_space: Observation space of one env.
      observe: Converts rows `[num_envs, 2]` to observations of another space.
      make_info: Returns the info at the end of an episode, given batch step and b.
        The info of a lost step contains a fault.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        terminates: list[bool] | None = None,
        lost: frozenset[tuple[int, int]] = frozenset(),
        action_space: gymnasium.Space[Any] = ACTIONS,
        observation_space: gymnasium.Space[Any] = BOX,
        observe: Callable[[np.ndarray], Any] = lambda rows: rows,
        make_info: Callable[[int, int], dict[str, Any]] = lambda step, b: {},
    ) -> None:
        self._make_info = make_info
        self.num_envs = len(lengths)
        self.spec = SimpleNamespace(env_name="fake")
        self.splits = (np.arange(self.num_envs),)
        self.observation_space = observation_space
        self.action_space = action_space
        self.actions: list[np.ndarray] = []
        self.is_closed = False
        self._lengths = np.array(lengths)
        self._terminates = np.array(terminates or [False] * len(lengths))
        self._lost = lost
        self._observe = observe
        self._count = np.zeros(len(lengths), np.int64)

    def __repr__(self) -> str:
        return "<CountingBatchEnv>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> BatchStats:
        num_steps = len(self.actions)
        rows = num_steps * self.num_envs
        return BatchStats(steps=num_steps, rows=rows, valid_rows=rows)

    def reset(self) -> Any:
        self.reset_infos: dict[int, Any] = {}
        self._count[:] = 0
        return self._observe(self._rows())

    def step(self, actions: np.ndarray, out: StepResult | None = None) -> StepResult:
        if not np.isfinite(actions).all():
            raise ActionError("expected finite actions")
        batch_step = len(self.actions)
        self.actions.append(actions.copy())
        self._count += 1
        final = self._rows()
        is_lost = np.array(
            [(batch_step, b) in self._lost for b in range(self.num_envs)]
        )
        ended = (self._count >= self._lengths) & ~is_lost
        self._count[ended | is_lost] = 0
        result = StepResult(
            self._observe(self._rows()),
            np.where(is_lost, 0.0, 1.0),
            ended & self._terminates,
            (ended & ~self._terminates) | is_lost,
            ~is_lost,
            self._observe(np.where(ended[:, None], final, 0.0)),
            np.where(is_lost, Status.WORKER_DIED, Status.OK).astype(np.uint8),
            {b: self._make_info(batch_step, b) for b in np.flatnonzero(ended).tolist()}
            | {b: {"fault": {}, "lost": 1} for b in np.flatnonzero(is_lost).tolist()},
        )
        if out is not None:
            _copy(result, out)
        return result

    def close(self) -> None:
        self.is_closed = True

    def _rows(self) -> np.ndarray:
        return np.stack([np.arange(self.num_envs), self._count], axis=1).astype(float)


class ScriptedBatchEnv:
    """Fake `BatchEnv` whose env b repeats `scripts[b]`, one letter per batch step.

    The letters mean: "." a valid step, "T" a terminated episode, "C" a truncated
    episode, "X" a lost episode, "P" padding, "L" a late result. Observations are
    random, except that padding repeats the previous one. With `num_splits`, split i
    consists of the rows i, i + num_splits, and so on.
    """

    def __init__(
        self,
        scripts: list[str],
        *,
        num_splits: int = 1,
        action_space: gymnasium.Space[Any] = ACTIONS,
    ) -> None:
        self.num_envs = len(scripts)
        self.spec = SimpleNamespace(env_name="fake")
        rows = np.arange(self.num_envs)
        self.splits = tuple(rows[first::num_splits] for first in range(num_splits))
        self.observation_space = BOX
        self.action_space = action_space
        self.num_in_flight = 0
        self._scripts = scripts
        self._step_of_row = np.zeros(self.num_envs, np.int64)
        self._generators = [np.random.default_rng(row) for row in rows]
        self._observation = np.zeros((self.num_envs, 2))

    def reset(self) -> Any:
        self._step_of_row[:] = 0
        self._observation[:] = [draw.normal(size=2) for draw in self._generators]
        return self._observation.copy()

    def send(self, actions: Any, env_indices: np.ndarray, *, together: bool) -> None:
        assert together
        self.num_in_flight += len(env_indices)

    def recv(
        self, *, env_indices: np.ndarray, out: StepResult
    ) -> tuple[np.ndarray, StepResult]:
        self.num_in_flight -= len(env_indices)
        _copy(self._step_rows(env_indices), out)
        return env_indices, out

    def step(self, actions: np.ndarray, out: StepResult) -> StepResult:
        _copy(self._step_rows(np.arange(self.num_envs)), out)
        return out

    def _step_rows(self, rows: np.ndarray) -> StepResult:
        letters = np.array(
            [
                self._scripts[row][self._step_of_row[row] % len(self._scripts[row])]
                for row in rows
            ]
        )
        self._step_of_row[rows] += 1
        drawn = np.array([self._generators[row].normal(size=4) for row in rows])
        is_padding = (letters == "P")[:, None]
        self._observation[rows] = np.where(
            is_padding, self._observation[rows], drawn[:, :2]
        )
        statuses = {"X": Status.WORKER_DIED, "P": Status.PENDING, "L": Status.LATE}
        status = [int(statuses.get(letter, Status.OK)) for letter in letters]
        valid = np.isin(letters, [".", "T", "C"])
        return StepResult(
            self._observation[rows],
            np.where(valid, drawn[:, 3], 0.0),
            letters == "T",
            np.isin(letters, ["C", "X"]),
            valid,
            drawn[:, 2:],
            np.array(status, np.uint8),
            {},
        )


def as_batch_env(env: Any) -> BatchEnv:
    """Return a fake with the type of the real class."""
    return cast(BatchEnv, env)


def in_graph(env: Any) -> InGraphBatchEnv:
    return InGraphBatchEnv(as_batch_env(env))


def _copy(result: Any, out: Any) -> None:
    if isinstance(out, np.ndarray):
        out[...] = result
    elif isinstance(out, tuple):
        for source, target in zip(result, out, strict=True):
            _copy(source, target)
    else:
        for key, target in out.items():
            _copy(result[key], target)
