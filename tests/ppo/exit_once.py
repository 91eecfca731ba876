"""An env with nested observations, one of whose instances takes its worker down once.

Importing this module registers it with Gymnasium.
"""

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

NAME = "ppo-tests/ExitOnce-v0"


class ExitOnceEnv(gymnasium.Env[Any, Any]):
    """Whoever finds the file `marker` at its tenth step removes it and exits."""

    def __init__(self, marker: str) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            position=gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64),
            phase=gymnasium.spaces.Discrete(3),
        )
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self._marker = Path(marker)
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        if self._count == 10 and self._marker.exists():
            self._marker.unlink(missing_ok=True)
            os._exit(1)
        return self._observation(), float(action[0]), False, self._count == 15, {}

    def _observation(self) -> dict[str, Any]:
        position = self.np_random.uniform(-1.0, 1.0, 2)
        return {"position": position, "phase": np.int64(self._count % 3)}


gymnasium.register(NAME, f"{__name__}:{ExitOnceEnv.__name__}")
