"""Wrappers that Gymnasium does not have as such: see docs/wrappers.md."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import (
    DtypeObservation,
    RepeatAction,
    RescaleAction,
    RescaleObservation,
)

from envserve.errors import SpaceError

__all__ = [
    "ActionRepeat",
    "FrameDelta",
    "FrameHistory",
    "RandomStart",
    "RangeNormalize",
    "StaggerEpisodes",
    "check_float",
]

Array = np.ndarray[Any, Any]
Env = gymnasium.Env[Any, Any]


def ActionRepeat(env: Env, amount: int) -> Env:
    """Repeats each action `amount` times, until the episode ends at the latest."""
    return RepeatAction(env, num_repeats=amount)


#: Episodes that may end during their random actions before one begins without any.
_MAX_TRIES: Final = 10
_SET_BY_HAND: Final = -1  # what Gymnasium says of a generator that was assigned


class RandomStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes 0 to `max_steps` random actions after each reset.

    How many, and which, is drawn from the env's own generator, `np_random`: so the same
    seed gives the same episodes, every env of a batch others, and who knows the state
    of that generator at an episode's begin can play it again.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], max_steps: int) -> None:
        super().__init__(env)
        self._max_steps = max_steps
        self._actions = copy.deepcopy(env.action_space)  # its generator is ours
        self._has_seeded = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env, and again if an episode is over before it begins."""
        observation, info = self.env.reset(seed=seed, options=options)
        generator = self._generator(seed)
        self._actions.seed(int(generator.integers(2**31)))
        for _ in range(_MAX_TRIES):
            is_over = False
            for _ in range(generator.integers(self._max_steps, endpoint=True)):
                action = self._actions.sample()
                observation, _, terminated, truncated, info = self.env.step(action)
                is_over = bool(terminated or truncated)
                if is_over:
                    break
            if not is_over:
                return observation, info
            observation, info = self.env.reset(options=options)
        return observation, info

    def _generator(self, seed: int | None) -> np.random.Generator:
        """Returns the env's generator; seeds it if the env leaves that to others."""
        env = self.env.unwrapped
        if seed is not None and (
            self._has_seeded or env.np_random_seed not in (seed, _SET_BY_HAND)
        ):
            env.np_random, _ = seeding.np_random(seed)
            self._has_seeded = True
        return env.np_random


#: Differences of short integers need longer ones, or they wrap around.
_WIDER: Final[dict[str, np.dtype[Any]]] = {
    **dict.fromkeys(("int8", "uint8"), np.dtype(np.int16)),
    **dict.fromkeys(("int16", "uint16"), np.dtype(np.int32)),
    **dict.fromkeys(("int32", "uint32"), np.dtype(np.int64)),
}


class FrameDelta(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the difference to the observation before; 0 after a reset."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wraps an env whose observations are a Box of floats or short integers."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or str(space.dtype) in ("int64", "uint64"):
            raise SpaceError(
                f"expected observations that are a Box of floats, or of integers of at "
                f"most 32 bits; got {space}"
            )
        dtype = _dtype_of_differences(space.dtype)
        with np.errstate(over="ignore"):  # infinite bounds are fine
            span = np.subtract(space.high, space.low, dtype=dtype)
        self.observation_space = spaces.Box(-span, span, dtype=dtype.type)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the env; nothing has changed yet."""
        observation, info = self.env.reset(**options)
        self._last = np.array(observation)  # envs may reuse theirs
        return np.zeros(self._last.shape, _dtype_of_differences(self._last.dtype)), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env, and compares."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        present = np.array(observation)
        delta = np.subtract(
            present, self._last, dtype=_dtype_of_differences(present.dtype)
        )
        self._last = present
        return delta, reward, terminated, truncated, info


def _dtype_of_differences(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _WIDER.get(str(dtype), dtype)


class FrameHistory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the observations of some steps ago, in the order of `past_indices`.

    Before an episode's first observation lies that observation itself, repeated.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        past_indices: tuple[int, ...],
        flatten: bool = False,
    ) -> None:
        """Wraps an env whose observations are a Box.

        Args:
          env: The env; observations of shape `[...]`.
          past_indices: How many steps ago; 0 is the present one.
          flatten: Join along the first axis, `[n * d, ...]`, instead of stacking along
            a new one, `[n, d, ...]`.
        """
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise SpaceError(f"expected observations that are a Box; got {space}")
        self._past_indices = past_indices
        self._is_flat = flatten and bool(space.shape)
        self._frames: deque[Array] = deque(maxlen=1 + max(past_indices))
        count = len(past_indices)
        self.observation_space = spaces.Box(
            self._join([space.low] * count),
            self._join([space.high] * count),
            dtype=space.dtype.type,
        )

    def reset(self, **options: Any) -> tuple[Array, dict[str, Any]]:
        """Resets the env, and fills the past with the first observation."""
        observation, info = self.env.reset(**options)
        frame = np.array(observation)  # envs may reuse theirs
        self._frames.extend([frame] * (1 + max(self._past_indices)))
        return self._history(), info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """Steps the env; the oldest observation is forgotten."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._frames.append(np.array(observation))
        return self._history(), reward, terminated, truncated, info

    def _history(self) -> Array:
        return self._join([self._frames[-1 - index] for index in self._past_indices])

    def _join(self, frames: list[Array]) -> Array:
        return np.concatenate(frames) if self._is_flat else np.stack(frames)


def RangeNormalize(env: Env, observation: bool = True, action: bool = True) -> Env:
    """Wraps an env; integers in observations become float32.

    Args:
      env: The env.
      observation: Whether to scale observations.
      action: Whether to take actions in [-1, 1].

    Raises:
      SpaceError: Bounds are infinite, or equal, or so large that they may as well be
        infinite; nothing sensible can be done about those.
    """
    if observation:
        _check_range("observation", env.observation_space)
        if not _is_float(env.observation_space):
            env = DtypeObservation(env, np.float32)
        env = RescaleObservation(env, np.float64(-1.0), np.float64(1.0))
    if action:
        _check_range("action", env.action_space)
        check_float("action", env.action_space)
        env = RescaleAction(env, np.float64(-1.0), np.float64(1.0))
    return env


def _check_range(part: str, space: spaces.Space[Any]) -> None:
    """Raises SpaceError unless each component has a range that can be divided by."""
    hint = f"set {part} = false"
    if not isinstance(space, spaces.Box):
        raise SpaceError(f"expected {part}s that are a Box; got {space}; {hint}")
    low, high = np.atleast_1d(space.low), np.atleast_1d(space.high)
    if not _is_float(space):
        low, high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(over="ignore"):
        span = high - low
    is_bad = ~(np.isfinite(span) & (span > 0))
    if is_bad.any():
        index = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise SpaceError(
            f"expected {part}s with finite bounds, low below high; got "
            f"[{low[index]}, {high[index]}] at {list(index)}; {hint}"
        )


def check_float(part: str, space: spaces.Space[Any]) -> None:
    """Raises SpaceError for integers, among which there is no scaling."""
    if not _is_float(space):
        raise SpaceError(f"expected {part}s that are floats; got {space}")


def _is_float(space: spaces.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "f"


class StaggerEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates an episode that begins with a seed at a random step up to the limit.

    In a batch these are the first episodes of envs. Without a limit it does nothing.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Draws from the seed, so that what the env draws does not depend on it."""
        spec = self.env.spec
        self._left = 0
        if seed is not None and spec and (limit := spec.max_episode_steps):
            self._left = int(np.random.default_rng([seed, limit]).integers(limit)) + 1
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Steps the env."""
        if not self._left:
            return self.env.step(action)
        self._left -= 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated or not self._left, info
