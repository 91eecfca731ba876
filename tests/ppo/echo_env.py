"""An env whose observations contain the action and the reward before them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

VECTOR = spaces.Box(-np.inf, np.inf, (6,), np.float64)


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observes episode, step, last action, last reward, whether it terminated, noise.

    Args:
      masks: Whether actions are Discrete and masked at random.
      fails: Whether steps fail at random.
    """

    def __init__(self, masks: bool = False, fails: bool = False) -> None:
        self._masks, self._fails, self._episode = masks, fails, 0
        self.observation_space: Any = VECTOR
        self.action_space: Any = spaces.Box(-2.0, 5.0, (1,))
        if masks:
            mask = spaces.MultiBinary(4)
            self.observation_space = spaces.Dict(action_mask=mask, row=VECTOR)
            self.action_space = spaces.Discrete(4, start=2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._observation(0.0, 0.0, False), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        luck, reward = self.np_random.random(), self.np_random.normal()
        assert not self._masks or self._mask[action - 2] == 1
        assert not self._fails or luck > 0.05
        self._step += 1
        observation = self._observation(float(np.ravel(action)[0]), reward, luck > 0.9)
        return observation, reward, luck > 0.9, luck < 0.15, {"step": self._step}

    def _observation(self, action: float, reward: float, terminated: bool) -> Any:
        noise = self.np_random.normal()
        row = [self._episode, self._step, action, reward, terminated, noise]
        if not self._masks:
            return np.array(row)
        self._mask = self.np_random.integers(2, size=4, dtype=np.int8)
        self._mask[self.np_random.integers(4)] = 1
        return {"action_mask": self._mask, "row": np.array(row)}
