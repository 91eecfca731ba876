"""ActionRepeat: one action, several steps."""

from __future__ import annotations

from typing import Any

import gymnasium

__all__ = ["ActionRepeat"]


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, until the episode ends at the latest.

    The reward is the sum over these steps; all else is the last one's.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], amount: int) -> None:
        """Repeats each action `amount` times."""
        super().__init__(env)
        self._amount = amount

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env up to `amount` times."""
        total = 0.0
        for _ in range(self._amount):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info
