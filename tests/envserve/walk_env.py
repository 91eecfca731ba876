"""An env that counts its steps, and exits its process on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

ENV = f"{Path(__file__)}:Walk"
EPISODE_LENGTH = 5


class Walk(gymnasium.Env[Any, Any]):
    """Observes 100 plus the number of its steps; action 1 exits its process."""

    observation_space = gymnasium.spaces.Box(0, 200, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            os._exit(1)
        self.time += 1
        return self._observe(), 1.0, self.time == EPISODE_LENGTH, False, {}

    def _observe(self) -> Any:
        return np.array([100 + self.time], np.float32)
