"""An env whose first row does not finish its first step until a file exists."""

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import envserve


class StallingEnv(gymnasium.Env[Any, Any]):
    """Env with endless episodes; the env of row 0 waits for the file `path`."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        context = envserve.env_context()
        self._waits = context is not None and context.row == 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while self._waits and not self._path.exists():
            time.sleep(0.001)
        return np.zeros(1, np.float32), 0.0, False, False, {}
