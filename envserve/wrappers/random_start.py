"""RandomStart: episodes that begin after some random actions."""

from __future__ import annotations

import copy
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.utils import seeding

__all__ = ["RandomStart"]

#: Episodes that may end during their random actions before one begins without any.
_MAX_TRIES: Final = 10
_SET_BY_HAND: Final = -1  # what Gymnasium says of a generator that was assigned


class RandomStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes 0 to `max_steps` random actions after each reset.

    How many, and which, is drawn from the env's own generator, `np_random`: so the same
    seed gives the same episodes, every env of a batch others, and who knows the state
    of that generator at an episode's begin can play it again.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], max_steps: int) -> None:
        """Takes up to `max_steps` random actions."""
        super().__init__(env)
        self._max_steps = max_steps
        self._actions = copy.deepcopy(env.action_space)  # its generator is ours
        self._has_seeded = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env, and again if an episode is over before it begins."""
        observation, info = self.env.reset(seed=seed, options=options)
        generator = self._generator(seed)
        self._actions.seed(int(generator.integers(2**31)))
        for _ in range(_MAX_TRIES):
            is_over = False
            for _ in range(generator.integers(self._max_steps, endpoint=True)):
                action = self._actions.sample()
                observation, _, terminated, truncated, info = self.env.step(action)
                is_over = bool(terminated or truncated)
                if is_over:
                    break
            if not is_over:
                return observation, info
            observation, info = self.env.reset(options=options)
        return observation, info

    def _generator(self, seed: int | None) -> np.random.Generator:
        """Returns the env's generator; seeds it if the env leaves that to others."""
        env = self.env.unwrapped
        if seed is not None and (
            self._has_seeded or env.np_random_seed not in (seed, _SET_BY_HAND)
        ):
            env.np_random, _ = seeding.np_random(seed)
            self._has_seeded = True
        return env.np_random
