"""A cross-entropy method in a few lines: each env evaluates a different policy."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from envserve.client import StepResult
from envserve.errors import SpaceError
from envserve.slab import Array, Status

#: New policies are sampled from a normal distribution around the mean of the best
#: `_NUM_BEST` policies. The standard deviation is `_SPREAD` times the standard
#: deviation of the best policies. With these values, 23 of 24 seeds learned CartPole
#: within 1,900 to 3,200 batch steps of 32 envs.
_NUM_BEST: Final = 4
_SPREAD: Final = 0.9
#: All observations are normalised with the mean and variance of the first 4,096.
_NUM_SCALED: Final = 4096


class Learner:
    """Searches for a linear policy, by sampling new policies around the best ones.

    Attributes:
      returns: Returns of the last `num_envs` episodes.
    """

    def __init__(
        self, name: str, env: gymnasium.Env[Any, Any], num_envs: int, seed: int
    ) -> None:
        """Sample the initial policies; `name` is the env's name for error messages.

        Raises:
          SpaceError: The spaces are not supported.
        """
        space, actions = env.observation_space, env.action_space
        if not isinstance(space, Box) or not isinstance(actions, Discrete | Box):
            raise SpaceError(
                f"{name}: expected Box observations and Discrete or Box "
                f"actions; got {space} and {actions}; use another env"
            )
        self._actions, self._random = actions, np.random.default_rng(seed)
        shape = (actions.n,) if isinstance(actions, Discrete) else actions.shape
        size, width = int(np.prod(space.shape)), int(np.prod(shape))
        self._policies = self._random.normal(size=(num_envs, size + 1, width))
        self._best: list[tuple[float, Array]] = []
        self._returns_so_far = np.zeros(num_envs)
        self._num_seen, self._sums = 0, np.zeros((2, size))
        self.returns: deque[float] = deque(maxlen=num_envs)

    def act(self, observation: Array, rows: Array) -> Array:
        """Return the actions of rows `[n]` for their observations `[n, ...]`."""
        flat = observation.reshape(len(rows), -1).astype(np.float64)
        if self._num_seen < _NUM_SCALED:
            self._num_seen += len(rows)
            self._sums += flat.sum(0), (flat**2).sum(0)
        mean, square = self._sums / self._num_seen
        inputs = np.ones((len(rows), flat.shape[1] + 1))
        inputs[:, 1:] = (flat - mean) / np.sqrt(np.maximum(square - mean**2, 1e-8))
        outputs = np.einsum("ni,nio->no", inputs, self._policies[rows])
        if isinstance(self._actions, Discrete):
            return np.asarray(self._actions.start + outputs.argmax(1))
        low, high = np.clip((self._actions.low, self._actions.high), -10.0, 10.0)
        fraction = (np.tanh(outputs).reshape(-1, *low.shape) + 1) / 2
        return np.asarray(low + fraction * (high - low), self._actions.dtype)

    def learn(self, rows: Array, result: StepResult) -> None:
        """Record the results of rows `[n]`; sample a new policy after each episode.

        An episode that a fault has cut off is discarded: its policy is used again.
        """
        self._returns_so_far[rows] += result.reward
        ended = result.terminated | result.truncated
        is_complete = (result.status == Status.OK) | (result.status == Status.LATE)
        for row in rows[ended & is_complete]:
            score, policy = float(self._returns_so_far[row]), self._policies[row].copy()
            self.returns.append(score)
            # Prefer the newest of equally good policies: later ones are closer to the
            # mean.
            candidates = [(score, policy), *self._best]
            self._best = sorted(candidates, key=lambda pair: -pair[0])[:_NUM_BEST]
            new_policy = self._random.normal(size=policy.shape)
            if len(self.returns) == self.returns.maxlen:
                policies = np.array([pair for _, pair in self._best])
                new_policy = policies.mean(0) + _SPREAD * policies.std(0) * new_policy
            self._policies[row] = new_policy
        self._returns_so_far[rows[ended]] = 0.0
