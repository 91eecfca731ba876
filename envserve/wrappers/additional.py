"""Wrappers in addition to Gymnasium's; "Wrappers" in the docs describes them."""

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
    RescaleAction,
    RescaleObservation,
    TimeLimit,
)

from envserve.errors import SpaceError

Array = np.ndarray[Any, Any]
Env = gymnasium.Env[Any, Any]


class RepeatAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeat each action `num_repeats` times, or until the episode ends.

    Defined here because Gymnasium 1.2 has no wrapper of this name.
    """

    def __init__(self, env: Env, num_repeats: int) -> None:
        super().__init__(env)
        self._num_repeats = num_repeats

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env `num_repeats` times, and return the sum of the rewards."""
        total = 0.0
        for _ in range(self._num_repeats):
            observation, reward, *ends, info = self.env.step(action)
            total += float(reward)  # a sum of NumPy numbers would have their dtype
            if any(ends):
                break
        return observation, total, *ends, info


def ActionRepeat(env: Env, amount: int) -> Env:
    """Repeat each action `amount` times, or until the episode ends."""
    return RepeatAction(env, amount)


#: If this number of episodes have ended during the random actions after one reset, the
#: next episode starts without random actions.
_MAX_ATTEMPTS: Final = 10
#: Value of `np_random_seed` in Gymnasium if the env assigned its own generator.
_ASSIGNED_BY_ENV: Final = -1


class RandomStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Take 0 to `max_steps` random actions after each reset.

    Both the number of actions and the actions are drawn from the env's own generator,
    `np_random`. Therefore, the same seed leads to the same episodes, the envs of a
    batch differ, and an episode can be replayed from the state of that generator.
    """

    def __init__(self, env: Env, max_steps: int) -> None:
        super().__init__(env)
        self._max_steps = max_steps
        self._actions = copy.deepcopy(env.action_space)  # a copy, because it is seeded
        self._has_seeded = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the env and take the random actions; retry if they end the episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        generator = self._generator(seed)
        self._actions.seed(int(generator.integers(2**31)))
        for _ in range(_MAX_ATTEMPTS):
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
        """Return the env's generator; seed it if the env does not do so itself."""
        env = self.env.unwrapped
        if seed is not None and (
            self._has_seeded or env.np_random_seed not in (seed, _ASSIGNED_BY_ENV)
        ):
            env.np_random, _ = seeding.np_random(seed)
            self._has_seeded = True
        return env.np_random


#: Maps dtypes of short integers to dtypes in which their differences cannot overflow.
_DIFFERENCE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    **dict.fromkeys(("int8", "uint8"), np.dtype(np.int16)),
    **dict.fromkeys(("int16", "uint16"), np.dtype(np.int32)),
    **dict.fromkeys(("int32", "uint32"), np.dtype(np.int64)),
}


class FrameDelta(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observe the difference from the previous observation; 0 after a reset."""

    def __init__(self, env: Env) -> None:
        """Wrap an env whose observations are a Box of floats or of short integers.

        Raises:
          SpaceError: The observation space is not such a Box.
        """
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or str(space.dtype) in ("int64", "uint64"):
            raise SpaceError(
                f"expected a Box of floats, or of integers of at most 32 bits, as "
                f"observation space; got {space}"
            )
        dtype = _difference_dtype(space.dtype)
        with np.errstate(over="ignore"):  # a range may be infinite
            span = np.subtract(space.high, space.low, dtype=dtype)
        self.observation_space = spaces.Box(-span, span, dtype=dtype.type)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the env and observe zeros."""
        observation, info = self.env.reset(**options)
        self._previous = np.array(observation)  # a copy: envs may reuse their array
        return np.zeros(
            self._previous.shape, _difference_dtype(self._previous.dtype)
        ), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env and observe the difference."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        current = np.array(observation)
        delta = np.subtract(
            current, self._previous, dtype=_difference_dtype(current.dtype)
        )
        self._previous = current
        return delta, reward, terminated, truncated, info


def _difference_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _DIFFERENCE_DTYPES.get(str(dtype), dtype)


class FrameHistory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observe the current and past observations listed in `past_indices`.

    At the start of an episode, the history contains copies of the first observation.
    """

    def __init__(
        self, env: Env, past_indices: tuple[int, ...], flatten: bool = False
    ) -> None:
        """Wrap an env whose observations are a Box.

        Args:
          env: The env; observations of shape `[d, ...]`.
          past_indices: Ages of the observations in steps; 0 is the current observation.
          flatten: Whether to concatenate along the first axis, `[n * d, ...]`, instead
            of stacking along a new one, `[n, d, ...]`.

        Raises:
          SpaceError: The observation space is not a Box.
        """
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise SpaceError(f"expected a Box as observation space; got {space}")
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
        """Reset the env, and fill the history with the first observation."""
        observation, info = self.env.reset(**options)
        frame = np.array(observation)  # a copy: envs may reuse their array
        self._frames.extend([frame] * (1 + max(self._past_indices)))
        return self._history(), info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """Step the env, and drop the oldest observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._frames.append(np.array(observation))
        return self._history(), reward, terminated, truncated, info

    def _history(self) -> Array:
        return self._join([self._frames[-1 - index] for index in self._past_indices])

    def _join(self, frames: list[Array]) -> Array:
        return np.concatenate(frames) if self._is_flat else np.stack(frames)


def RangeNormalize(env: Env, observation: bool = True, action: bool = True) -> Env:
    """Scale observations and actions to [-1, 1]; integer observations become float32.

    Args:
      env: The env.
      observation: Whether to scale observations.
      action: Whether to scale actions.

    Raises:
      SpaceError: A space is not a Box, actions are not floats, or bounds are equal,
        infinite, or so large that their range is infinite.
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
    """Raise SpaceError unless every component has a finite, positive range."""
    hint = f"set {part} = false"
    if not isinstance(space, spaces.Box):
        raise SpaceError(f"expected a Box as {part} space; got {space}; {hint}")
    # An infinite bound of integers is stored as the limit of the dtype.
    low = np.where(space.bounded_below, np.atleast_1d(space.low), -np.inf)
    high = np.where(space.bounded_above, np.atleast_1d(space.high), np.inf)
    with np.errstate(over="ignore"):
        span = high - low
    is_invalid = ~(np.isfinite(span) & (span > 0))
    if is_invalid.any():
        index = tuple(int(i) for i in np.argwhere(is_invalid)[0])
        raise SpaceError(
            f"expected {part}s with finite bounds, low below high; got "
            f"[{low[index]}, {high[index]}] at {list(index)}; {hint}"
        )


def check_float(part: str, space: spaces.Space[Any]) -> None:
    """Raise SpaceError unless a space contains floats, which can be scaled."""
    if not _is_float(space):
        raise SpaceError(f"expected {part}s of floats; got {space}")


def _is_float(space: spaces.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "f"


class StaggerEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncate each seeded episode at a random step within the time limit.

    In a batch, the first episodes of the envs are seeded, so they do not all end at
    once. Without a time limit, the wrapper has no effect.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset the env; if there is a seed, derive the truncation step from it.

        The env's generator is not used, so the env's own random numbers do not change.
        """
        self._steps_left = 0
        if seed is not None and (limits := self._time_limits()):
            limit = min(limits)
            self._steps_left = (
                int(np.random.default_rng([seed, limit]).integers(limit)) + 1
            )
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step the env; truncate a seeded episode at its random step."""
        if not self._steps_left:
            return self.env.step(action)
        self._steps_left -= 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated or not self._steps_left, info

    def _time_limits(self) -> list[int]:
        """Return the time limits of the env; its own and those of wrappers."""
        layer: Any = self
        limits = []
        while layer is not layer.unwrapped:
            layer = layer.env
            if isinstance(layer, TimeLimit):  # its spec is None if its env has none
                limits.append(layer._max_episode_steps)
            elif layer.spec and (limit := layer.spec.max_episode_steps):
                limits.append(limit)
        return limits
