"""CartPole without its velocities: a task for recurrent policies."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation


def _make(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1", **kwargs)
    positions = Box(-np.inf, np.inf, (2,), np.float32)  # cart position, pole angle
    return TransformObservation(env, lambda observation: observation[::2], positions)


gymnasium.register("CartPoleNoVelocity-v1", _make)
