"""RangeNormalize: observations and actions in [-1, 1], by their spaces' bounds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import DtypeObservation, RescaleAction, RescaleObservation

from envserve.errors import SpaceError

__all__ = ["check_float", "range_normalize"]

Env = gymnasium.Env[Any, Any]


def range_normalize(env: Env, observation: bool = True, action: bool = True) -> Env:
    """Wraps an env; integers in observations become float32.

    Args:
      env: The env.
      observation: Whether to scale observations.
      action: Whether to take actions in [-1, 1].

    Raises:
      SpaceError: Bounds are infinite, or equal, or so large that they may as well be
        infinite; nothing sensible can be done about those.
    """
    if observation:
        _check_range("observation", env.observation_space)
        if not _is_float(env.observation_space):
            env = DtypeObservation(env, np.float32)
        env = RescaleObservation(env, np.float64(-1.0), np.float64(1.0))
    if action:
        _check_range("action", env.action_space)
        check_float("action", env.action_space)
        env = RescaleAction(env, np.float64(-1.0), np.float64(1.0))
    return env


def _check_range(part: str, space: spaces.Space[Any]) -> None:
    """Raises SpaceError unless each component has a range that can be divided by."""
    hint = f"set {part} = false"
    if not isinstance(space, spaces.Box):
        raise SpaceError(f"expected {part}s that are a Box; got {space}; {hint}")
    low, high = np.atleast_1d(space.low), np.atleast_1d(space.high)
    if not _is_float(space):
        low, high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(over="ignore"):
        span = high - low
    is_bad = ~(np.isfinite(span) & (span > 0))
    if is_bad.any():
        index = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise SpaceError(
            f"expected {part}s with finite bounds, low below high; got "
            f"[{low[index]}, {high[index]}] at {list(index)}; {hint}"
        )


def check_float(part: str, space: spaces.Space[Any]) -> None:
    """Raises SpaceError for integers, among which there is no scaling."""
    if not _is_float(space):
        raise SpaceError(f"expected {part}s that are floats; got {space}")


def _is_float(space: spaces.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "f"
