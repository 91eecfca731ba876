"""An env that only a memory solves: what was shown first is asked for at the end.

Importing this module registers it with Gymnasium.
"""

from typing import Any

import gymnasium
import numpy as np

__all__ = ["NAME", "RecallEnv"]

NAME = "ppo-tests/Recall-v0"


class RecallEnv(gymnasium.Env[Any, Any]):
    """Shows a cue, -1 or 1, then nothing, and asks for it in the last of its steps.

    Observes the cue, which is 0 from the second step on, and whether this is the last
    step. All that came before is hidden then: whoever sees one observation alone can do
    no better than to guess.

    Where actions are discrete, naming the cue (1 for 1, 0 for -1) earns 1, so guessing
    earns 0.5. Else the answer earns 1 minus its squared distance from the cue, so the
    best guess, 0, earns 0.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int = 5, is_discrete: bool = True) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Box(
            -2.0, 2.0, (1,), np.float32
        )
        if is_discrete:
            self.action_space = gymnasium.spaces.Discrete(2)
        self._is_discrete = is_discrete
        self._length = length
        self._step = 0
        self._cue = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._cue = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self._cue, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        is_last = self._step == self._length - 1
        is_over = self._step == self._length
        observation = np.array([0.0, is_last], np.float32)
        return observation, self._reward(action) if is_over else 0.0, is_over, False, {}

    def _reward(self, action: Any) -> float:
        if self._is_discrete:
            return float(action == (self._cue > 0))
        return 1.0 - (float(action[0]) - self._cue) ** 2


gymnasium.register(NAME, f"{__name__}:{RecallEnv.__name__}")
