"""An env whose episodes end in every way, for every kind of action."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

FLOAT32: Any = np.float32
STATE = Box(-np.inf, np.inf, (4,), np.float64)
ACTIONS: dict[str, Any] = {
    "box": Box(np.array([-2, -1], FLOAT32), np.array([1, 3], FLOAT32)),
    "discrete": Discrete(3, start=5),
    "multi_discrete": MultiDiscrete([2, 3]),
    "bits": MultiBinary(3),
}
OBSERVATIONS: dict[str, Any] = {
    "box": STATE,
    "discrete": Dict(action_mask=MultiBinary(3), place=Discrete(4, start=2), x=STATE),
    "multi_discrete": Dict(action_mask=MultiBinary(5), x=STATE),
    "bits": STATE,
}


class Unsteady(gymnasium.Env[Any, Any]):
    """Env whose steps terminate, truncate or raise at random.

    One element of an observation is near a million, one is constant, and one is small.
    Some action masks allow no action.
    """

    def __init__(self, kind: str) -> None:
        self.action_space = ACTIONS[kind]
        self.observation_space = OBSERVATIONS[kind]
        self._level = 0.0
        self._num_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._level, self._num_steps = self.np_random.normal(), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        chance = self.np_random.random()
        # An env that fails in its first step would lose its process, and return a
        # number of padding rows that depends on time.
        if chance > 0.92 and self._num_steps > 1:
            raise RuntimeError("this step fails at random")
        noise = self.np_random.normal()
        self._level = 0.8 * self._level + 0.3 * float(np.mean(action)) + noise
        reward = 5.0 * self._level + self.np_random.normal()
        return self._observation(), reward, chance < 0.07, 0.07 < chance < 0.14, {}

    def _observation(self) -> Any:
        random, level = self.np_random, self._level
        state = np.array([1e6 + level, 7.5, 1e-3 * random.normal(), level**2])
        if not isinstance(self.observation_space, Dict):
            return state
        observation = {"x": state}
        for name, space in self.observation_space.spaces.items():
            if isinstance(space, Discrete):
                observation[name] = random.integers(space.n) + space.start
            elif isinstance(space, MultiBinary):
                flags = random.random(space.n) < 0.6
                observation[name] = flags.astype(np.int8)
        return observation
