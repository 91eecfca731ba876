"""An env that fails or hangs in one of its methods, always or only once."""

import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Diverging(gymnasium.Env[Any, Any]):
    """Env with an infinite or undefined third step, whose fifth step raises.

    The steps of all episodes count. The first env of a batch returns an infinite
    reward, the others an observation that is not a number.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, row: str) -> None:
        self._row = int(row)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        count = _steps[self._row] = _steps.get(self._row, 0) + 1
        if count == 5:
            raise ValueError("a bug")
        is_bad = np.array([count == 3 and self._row > 0])
        observation = np.where(is_bad, np.nan, 0.0).astype(np.float32)
        reward = np.inf if count == 3 and not self._row else 1.0
        return observation, reward, False, False, {}


_steps: dict[int, int] = {}


class Failing(gymnasium.Env[Any, Any]):
    """Env with a fault in `method`: "__init__", "reset" or "step".

    The fault is an exception, or a wait without end if `hangs`. If `marker` is given,
    only the first call fails, and creates this file. With `masks`, observations contain
    an action mask that forbids every action.
    """

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(
        self,
        method: str = "",
        marker: str = "",
        *,
        hangs: bool = False,
        masks: bool = False,
    ) -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space: gymnasium.Space[Any] = box
        if masks:
            flags = gymnasium.spaces.MultiBinary(2)
            self.observation_space = gymnasium.spaces.Dict(action_mask=flags, x=box)
        self._method, self._hangs, self._masks = method, hangs, masks
        self._marker = Path(marker) if marker else None
        self._fail_in("__init__")

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._fail_in("reset")
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._fail_in("step")
        assert not self._masks, "this action is masked"
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        x = np.zeros(1, np.float32)
        return {"action_mask": np.zeros(2, np.int8), "x": x} if self._masks else x

    def _fail_in(self, method: str) -> None:
        if method != self._method or (self._marker and self._marker.exists()):
            return
        if self._marker is not None:
            self._marker.touch()
        if self._hangs:
            threading.Event().wait()
        raise RuntimeError(f"a bug in {method}")
