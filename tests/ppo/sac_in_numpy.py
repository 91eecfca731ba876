"""Updates of SAC in float64 NumPy, without the code of the trainer.

This follows Haarnoja et al. 2018 and the page "SAC". Gradients are computed by
hand-written backpropagation.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from ppo.config import Config
from ppo.rollout import Rollout
from tests.ppo.iteration_in_numpy import Array, SquashedGaussian, backward, forward

POLICY, CRITICS, TARGETS = 0, (1, 2), (3, 4)


class Reference:
    """A training run that gets its rollouts and random numbers from another one.

    Observations are vectors, and critics have one hidden layer.

    Args:
      config: The settings of the run.
      networks: Initial kernels and biases of the policy, the two critics and the two
        target networks.

    Attributes:
      networks: Current kernels and biases.
      log_temperature: Logarithm of the current temperature, `[1]`.
    """

    def __init__(self, config: Config, networks: list[list[Array]]) -> None:
        self.config, self._settings = config, config.algorithm_settings
        self.networks = [[a.astype(np.float64) for a in part] for part in networks]
        self.log_temperature = np.log([self._settings["initial_temperature"]])
        self._moments: dict[int, list[Array]] = {}
        # A new transition replaces the oldest one.
        size = self._settings["replay_size"]
        self._transitions = collections.deque[tuple[Any, ...]](maxlen=size)

    def add(self, rollout: Rollout) -> None:
        """Add the valid transitions of a rollout, in the order of steps."""
        for at in np.ndindex(*rollout.reward.shape):
            if rollout.valid[at]:
                after = rollout.observation[at[0] + 1, at[1]]
                after = rollout.final_observation[at] if rollout.done[at] else after
                start = rollout.observation[at], rollout.action[at], rollout.reward[at]
                self._transitions.append((*start, after, rollout.terminated[at]))

    def learn(self, samples: Array, noise_of: Callable[[int], Array]) -> Array:
        """Take gradient steps, and return the mean of each metric.

        Args:
          samples: Indices of transitions in the replay buffer, from 0 for the oldest,
            `[steps, N]`.
          noise_of: Returns the noise of a gradient step, `[2, N, A]`.
        """
        steps = [
            self._step([*zip(*(self._transitions[i] for i in chosen), strict=True)], n)
            for chosen, n in zip(
                samples, map(noise_of, range(len(samples))), strict=True
            )
        ]
        return np.mean(steps, axis=0)

    def _step(self, batch: list[Any], noises: Array) -> list[float]:
        before, action, reward, after, terminated = (np.array(part) for part in batch)
        temperature, count = np.exp(self.log_temperature[0]), len(reward)
        noise, next_noise = noises
        policy, _ = self._policy(after)
        next_action = policy.mean + policy.std * next_noise
        rows = np.hstack([after, np.tanh(next_action)])
        target = np.min([self._forward(i, rows)[-1][:, 0] for i in TARGETS], axis=0)
        target -= temperature * policy.log_prob(next_action)
        target = reward + self.config.discount * np.where(terminated, 0.0, target)

        rows, value_loss = np.hstack([before, np.tanh(action)]), 0.0
        slopes: list[Array] = []
        for index in CRITICS:
            arrays = self._forward(index, rows)
            error = arrays[-1][:, 0] - target
            value_loss += 0.5 * float(np.mean(error**2))
            slope = error[:, None] / count
            slopes += backward(self.networks[index], arrays, slope)
        self._adam(self.networks[1] + self.networks[2], slopes)

        policy, arrays = self._policy(before)
        action = policy.mean + policy.std * noise
        squashed, log_prob = np.tanh(action), policy.log_prob(action)
        rows = np.hstack([before, squashed])
        values, by_action = [], []
        for index in CRITICS:
            kernel, _, output, _ = self.networks[index]
            _, hidden, value = self._forward(index, rows)
            by_row = ((1.0 - hidden**2) * output[:, 0]) @ kernel.T
            by_action.append(by_row[:, before.shape[1] :] * (1.0 - squashed**2))
            values.append(value)
        is_first = values[0] < values[1]
        value = np.where(is_first, *values)[:, 0]
        policy_loss = float(np.mean(temperature * log_prob - value))
        # The noise is constant, so the log-density before tanh changes with the
        # deviation only.
        slope = temperature * 2.0 * squashed - np.where(is_first, *by_action)
        by_log_std = slope * policy.std * noise - temperature
        slope = np.hstack([slope, by_log_std]) / count
        layers = self.networks[POLICY]
        self._adam(layers, backward(layers, arrays, slope))

        entropy = -float(np.mean(log_prob))
        excess = entropy - self._settings["target_entropy"] * action.shape[1]
        # The temperature loss is log(temperature) * (entropy - target entropy).
        self._adam([self.log_temperature], [np.array([excess])])
        for critic, slow in zip(CRITICS, TARGETS, strict=True):
            for new, old in zip(
                self.networks[critic], self.networks[slow], strict=True
            ):
                old += self._settings["tau"] * (new - old)
        return [value_loss, policy_loss, entropy, float(value.mean()), temperature]

    def _forward(self, index: int, rows: Array) -> list[Array]:
        return forward(self.networks[index], rows)

    def _policy(self, rows: Array) -> tuple[SquashedGaussian, list[Array]]:
        arrays = self._forward(POLICY, rows)
        mean, log_std = np.split(arrays[-1], 2, axis=1)
        log_std = log_std + self.config.initial_log_std
        return SquashedGaussian(np.hstack([mean, log_std])), arrays

    def _adam(self, arrays: list[Array], gradients: list[Array]) -> None:
        for array, gradient in zip(arrays, gradients, strict=True):
            zeros = [np.zeros_like(array), np.zeros_like(array), np.zeros(1)]
            first, second, count = self._moments.setdefault(id(array), zeros)
            count += 1
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            rate = np.sqrt(1.0 - 0.999**count) / (1.0 - 0.9**count)
            array -= self.config.learning_rate * rate * first / (np.sqrt(second) + 1e-7)
