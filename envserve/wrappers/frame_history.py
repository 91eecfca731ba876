"""FrameHistory: chosen observations of the past, together."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envserve.errors import SpaceError

__all__ = ["FrameHistory"]

Array = np.ndarray[Any, Any]


class FrameHistory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the observations of some steps ago, in the order of `past_indices`.

    Before an episode's first observation lies that observation itself, repeated.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        past_indices: tuple[int, ...],
        flatten: bool = False,
    ) -> None:
        """Wraps an env whose observations are a Box.

        Args:
          env: The env; observations of shape `[...]`.
          past_indices: How many steps ago; 0 is the present one.
          flatten: Join along the first axis, `[n * d, ...]`, instead of stacking along
            a new one, `[n, d, ...]`.
        """
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise SpaceError(f"expected observations that are a Box; got {space}")
        self._past_indices = past_indices
        self._is_flat = flatten and bool(space.shape)
        self._frames: deque[Array] = deque(maxlen=1 + max(past_indices))
        count = len(past_indices)
        self.observation_space = spaces.Box(
            self._join([space.low] * count),
            self._join([space.high] * count),
            dtype=space.dtype.type,
        )

    def reset(self, **options: Any) -> tuple[Array, dict[str, Any]]:
        """Resets the env, and fills the past with the first observation."""
        observation, info = self.env.reset(**options)
        frame = np.array(observation)  # envs may reuse theirs
        self._frames.extend([frame] * (1 + max(self._past_indices)))
        return self._history(), info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """Steps the env; the oldest observation is forgotten."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._frames.append(np.array(observation))
        return self._history(), reward, terminated, truncated, info

    def _history(self) -> Array:
        return self._join([self._frames[-1 - index] for index in self._past_indices])

    def _join(self, frames: list[Array]) -> Array:
        return np.concatenate(frames) if self._is_flat else np.stack(frames)
