"""An env with numbers in its infos, and with an attribute that callbacks set.

Importing this module registers it with Gymnasium.
"""

from typing import Any

import gymnasium
import numpy as np

NAME = "ppo-tests/Informing-v0"


class InformingEnv(gymnasium.Env[Any, Any]):
    """Env with episodes of 2 to 4 steps, and a random number per episode in infos."""

    level = 1

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._left = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 5))
        self._number = int(self.np_random.integers(0, 100))
        return self.np_random.uniform(-1.0, 1.0, 2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        info = {
            "success": self._number % 2 == 0,
            "number": np.float32(self._number),
            "level": self.level,
            "text": "no number",
            "rows": np.zeros(3),
            "nested": {"number": 3},
        }
        if self._number < 50:
            info["only_some"] = self._number
        is_over = self._left == 0
        return self.np_random.uniform(-1.0, 1.0, 2), 1.0, is_over, False, info


gymnasium.register(NAME, f"{__name__}:{InformingEnv.__name__}")
