"""Envs with known costs: they sleep, compute, return images, or echo requests.

Importing this module registers the envs, so workers that build them must import it.
"""

from __future__ import annotations

import time
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from envserve.envs.registry import make_env

Array = np.ndarray[Any, Any]
Transition = tuple[Array, float, bool, bool, dict[str, Any]]

MODULE: Final = __name__


class _ConstantEnv(gymnasium.Env[Array, np.int64]):
    """Env that always returns the same observation.

    Episodes have `episode_length` steps; with 0, they never end.
    """

    def __init__(self, observation_space: spaces.Box, episode_length: int) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2)
        self._observation = np.zeros(
            observation_space.shape, np.dtype(observation_space.dtype)
        )
        self._episode_length = episode_length
        self._step = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._observation, {}

    def step(self, action: np.int64) -> Transition:
        self._step += 1
        truncated = self._step == self._episode_length  # never true for length 0
        return self._observation, 0.0, False, truncated, {}


class SleepEnv(_ConstantEnv):
    """Env whose steps and resets sleep, as if they waited for a simulator process."""

    def __init__(
        self,
        step_seconds: float = 0.001,
        reset_seconds: float = 0.0,
        episode_length: int = 0,
        is_staggered: bool = False,
    ) -> None:
        """Create the env.

        Args:
          step_seconds: Duration of a step.
          reset_seconds: Duration of a reset.
          episode_length: Steps per episode; 0 for episodes that never end.
          is_staggered: Whether the first episode of each env is shorter, by a number of
          steps that depends on its seed.
        """
        super().__init__(spaces.Box(-1.0, 1.0, (4,), np.float32), episode_length)
        self._is_staggered = is_staggered
        self._step_seconds = step_seconds
        self._reset_seconds = reset_seconds

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Sleep, and start a new episode."""
        if self._reset_seconds:
            time.sleep(self._reset_seconds)
        result = super().reset(seed=seed, options=options)
        if self._is_staggered and seed is not None:
            self._step = seed % self._episode_length
        return result

    def step(self, action: np.int64) -> Transition:
        """Sleep, and count the step."""
        time.sleep(self._step_seconds)
        return super().step(action)


class BusyEnv(_ConstantEnv):
    """Env whose steps take a fixed amount of CPU time."""

    def __init__(self, step_seconds: float = 0.001) -> None:
        super().__init__(spaces.Box(-1.0, 1.0, (4,), np.float32), 0)
        self._step_seconds = step_seconds

    def step(self, action: np.int64) -> Transition:
        """Use CPU time, and count the step."""
        # Measure CPU time, because other processes affect the elapsed time.
        end = time.thread_time() + self._step_seconds
        while time.thread_time() < end:
            pass
        return super().step(action)


class ImageEnv(_ConstantEnv):
    """Env that does no work and returns uint8 images of shape `[84, 84, 4]`."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (84, 84, 4), np.uint8), 0)


class RequestEnv(gymnasium.Env[Array, Array]):
    """Env that echoes a number from the action, to match results to actions.

    The action is int64 `[2]`: the number, and the duration of the step in microseconds.
    The observation is int64 `[2]`: the number, and the number of steps since the reset.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 2**62, (2,), np.int64)
        self.action_space = spaces.Box(0, 2**62, (2,), np.int64)
        self._steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Set the step count to 0."""
        super().reset(seed=seed)
        self._steps = 0
        return np.array([-1, 0], np.int64), {}

    def step(self, action: Array) -> Transition:
        """Sleep for the duration in the action, and count the step."""
        request, microseconds = action.tolist()
        time.sleep(microseconds / 1e6)
        self._steps += 1
        return np.array([request, self._steps], np.int64), 0.0, False, False, {}


class TimedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that measures the duration of an env's calls.

    Attributes:
      seconds: Time spent in `step` and `reset` since the env was built.
    """

    def __init__(self, env_name: str) -> None:
        super().__init__(make_env(env_name, {}))
        self.seconds = 0.0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset the env."""
        started = time.perf_counter()
        result = self.env.reset(seed=seed, options=options)
        self.seconds += time.perf_counter() - started
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env."""
        started = time.perf_counter()
        result = self.env.step(action)
        self.seconds += time.perf_counter() - started
        return result


for _class in (SleepEnv, BusyEnv, ImageEnv, RequestEnv, TimedEnv):
    _name = _class.__name__.removesuffix("Env")
    gymnasium.register(f"envserve/{_name}-v0", f"{MODULE}:{_class.__name__}")
