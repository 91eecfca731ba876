"""CartPole without its velocities: a task for recurrent policies."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation


def _make(**named: Any) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1", **named)
    place_and_angle = Box(-np.inf, np.inf, (2,), np.float32)
    return TransformObservation(env, lambda all_four: all_four[::2], place_and_angle)


gymnasium.register("CartPoleNoVelocity-v1", _make)
