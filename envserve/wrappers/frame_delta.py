"""FrameDelta: what has changed since the step before."""

from __future__ import annotations

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from envserve.errors import SpaceError

__all__ = ["FrameDelta"]

#: Differences of short integers need longer ones, or they wrap around.
_WIDER: Final[dict[str, np.dtype[Any]]] = {
    **dict.fromkeys(("int8", "uint8"), np.dtype(np.int16)),
    **dict.fromkeys(("int16", "uint16"), np.dtype(np.int32)),
    **dict.fromkeys(("int32", "uint32"), np.dtype(np.int64)),
}


class FrameDelta(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the difference to the observation before; 0 after a reset."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wraps an env whose observations are a Box of floats or short integers."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or str(space.dtype) in ("int64", "uint64"):
            raise SpaceError(
                f"expected observations that are a Box of floats, or of integers of at "
                f"most 32 bits; got {space}"
            )
        dtype = _dtype_of_differences(space.dtype)
        with np.errstate(over="ignore"):  # infinite bounds are fine
            span = np.subtract(space.high, space.low, dtype=dtype)
        self.observation_space = spaces.Box(-span, span, dtype=dtype.type)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the env; nothing has changed yet."""
        observation, info = self.env.reset(**options)
        self._last = np.array(observation)  # envs may reuse theirs
        return np.zeros(self._last.shape, _dtype_of_differences(self._last.dtype)), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env, and compares."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        present = np.array(observation)
        delta = np.subtract(
            present, self._last, dtype=_dtype_of_differences(present.dtype)
        )
        self._last = present
        return delta, reward, terminated, truncated, info


def _dtype_of_differences(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return _WIDER.get(str(dtype), dtype)
