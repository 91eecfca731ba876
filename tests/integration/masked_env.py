"""Envs for adapter tests: one with action masks, one with asymmetric bounds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

ENV_NAME = "envserve-tests/Masked-v0"
LOPSIDED_NAME = "envserve-tests/Lopsided-v0"
EPISODE_LENGTH = 20


class Masked(gymnasium.Env[Any, Any]):
    """An env that allows and rewards one of four actions at each step."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(4)

    is_broken = False
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((2, 2, 3), np.uint8)

    def action_masks(self) -> Any:
        return np.arange(4) == self.allowed

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        self.label = (options or {}).get("label", "none")
        return self._observe(), {"seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.allowed)
        self.time += 1
        is_over = self.time == EPISODE_LENGTH
        return self._observe(), reward, False, is_over, {"label": self.label}

    def times(self, factor: int, *, plus: int = 0) -> int:
        return factor * self.time + plus

    @property
    def broken(self) -> int:
        raise RuntimeError("broken")

    def label_of(self, infos: Any) -> str:
        return type(infos[0]["is_success"]).__name__

    def _observe(self) -> Any:
        self.allowed = int(self.np_random.integers(4))
        shape = 2 if self.is_broken and self.time else 1
        return np.full(shape, self.time / EPISODE_LENGTH, np.float32)


gymnasium.register(ENV_NAME, f"{__name__}:Masked")


class Lopsided(gymnasium.Env[Any, Any]):
    """An env with asymmetric bounds that returns its action as the observation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Box(-0.2, 0.9, (1,))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action, 0.0, False, False, {}


gymnasium.register(LOPSIDED_NAME, f"{__name__}:Lopsided")
