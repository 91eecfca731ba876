"""A batch of envs whose every answer is known beforehand."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import gymnasium
import numpy as np

from envserve.client import BatchEnv, StepResult
from envserve.slab import Status

BOX = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class CountingBatchEnv:
    """Env b observes (b, its step count); an episode ends after `lengths[b]` steps.

    Every step earns 1. Where `terminates[b]`, episodes end by termination, else by
    truncation. Steps listed in `lost` as (batch step, b) come back invalid, and start
    a new episode. Observations are converted by `observe` to fit another space.
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
    ) -> None:
        self.num_envs = len(lengths)
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

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reset(self) -> Any:
        self._count[:] = 0
        return self._observe(self._rows())

    def step(self, actions: np.ndarray, out: StepResult | None = None) -> StepResult:
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
            {},
        )
        if out is not None:
            _copy(result, out)
        return result

    def close(self) -> None:
        self.is_closed = True

    def _rows(self) -> np.ndarray:
        return np.stack([np.arange(self.num_envs), self._count], axis=1).astype(float)


def as_batch_env(env: Any) -> BatchEnv:
    """Pass a fake off as the real thing, which it resembles as far as it is used."""
    return cast(BatchEnv, env)


def _copy(result: Any, out: Any) -> None:
    if isinstance(out, np.ndarray):
        out[...] = result
    elif isinstance(out, tuple):
        for source, target in zip(result, out, strict=True):
            _copy(source, target)
    else:
        for key, target in out.items():
            _copy(result[key], target)
