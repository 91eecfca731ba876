"""An env with given observations, for wrapper tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envserve.wrappers.apply import wrap
from envserve.wrappers.specs import WrapperSpec


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Returns the given observations in order, always in the same array.

    The reward of step n is n. The episode ends with the last observation.
    """

    action_space = spaces.Discrete(5, start=-2)
    render_mode = "rgb_array"

    def __init__(
        self, observations: Sequence[Any], dtype: str, low: float, high: float
    ) -> None:
        self._observations = np.array(observations, dtype)
        shape = self._observations.shape[1:]
        self.observation_space = spaces.Box(low, high, shape, np.dtype(dtype).type)
        self.array = np.empty(shape, dtype)
        self.actions: list[Any] = []

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        self.array[...] = self._observations[0]
        return self.array, {"step": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self.actions.append(action)
        self.array[...] = self._observations[self._step]
        is_over = self._step == len(self._observations) - 1
        return self.array, float(self._step), is_over, False, {"step": self._step}

    def render(self) -> Any:
        return self.array.copy()


class Bounded(gymnasium.Env[Any, Any]):
    """Observes the lower bounds after a reset, and the last action after a step."""

    def __init__(
        self,
        observation: spaces.Space[Any],
        action: spaces.Space[Any] = ScriptedEnv.action_space,
    ) -> None:
        self.observation_space = observation
        self.action_space = action

    def reset(self, **_: Any) -> Any:
        return np.array(self.observation_space.low), {}  # type: ignore[attr-defined]

    def step(self, action: Any) -> Any:
        return np.array(action), 0.0, False, False, {}


def scripted(
    observations: Sequence[Any], dtype: str = "float32", low: float = 0, high: float = 9
) -> ScriptedEnv:
    return ScriptedEnv(observations, dtype, low, high)


def wrapped(env: gymnasium.Env[Any, Any], name: str, **arguments: Any) -> Any:
    return wrap(env, (WrapperSpec(name, arguments),))


def episode_observations(env: Any, action: Any = 0) -> list[Any]:
    """Play an episode, and return its observations."""
    observations = [env.reset()[0]]
    while True:
        observation, _, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        if terminated or truncated:
            return observations
