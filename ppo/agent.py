"""The agent: preprocessor, policy and value network of one pair of spaces.

It acts (`act`, `mode`), judges (`distribution`, `value`) and names everything that a
checkpoint must hold. It does not learn; that is for `ppo.update`.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.config import Config
from ppo.distributions import Categorical, DiagonalGaussian, Distribution
from ppo.errors import UnsupportedSpaceError
from ppo.networks import CategoricalNetwork, GaussianNetwork, ValueNetwork
from ppo.observations import ObservationPreprocessor

__all__ = ["Agent"]


class Agent:
    """Policy and value function for an observation space and an action space."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: Config,
    ) -> None:
        self.preprocess = ObservationPreprocessor(
            observation_space,
            normalize=config.normalize_observations,
            clip=config.observation_clip,
        )
        policy_seed, value_seed = _network_seeds(config.seed)
        self._policy, self._distribution_type = _make_policy(
            action_space, self.preprocess.size, config, policy_seed
        )
        self._noise_size = (
            int(action_space.n)
            if isinstance(action_space, gymnasium.spaces.Discrete)
            else math.prod(action_space.shape or ())
        )
        self._value = ValueNetwork(
            self.preprocess.size,
            hidden_sizes=config.value_layers,
            activation=config.activation,
            seed=value_seed,
        )

    def act(self, observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sample an action per row of a raw observation.

        Args:
            observation: raw observation, rows `[N, ...]`.
            seed: int32 pair; the same seed gives the same actions.

        Returns:
            Actions (float32 `[N, A]` or int64 `[N]`) and log-probabilities `[N]`.
        """
        num_rows = tf.nest.flatten(observation)[0].shape[0]
        return self.act_on_noise(observation, self.draw_noise(num_rows, seed))

    def act_on_noise(
        self, observation: Any, noise: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sample an action per row, as `act` does, with noise that was drawn before.

        Args:
            observation: raw observation, rows `[N, ...]`.
            noise: N rows of what `draw_noise` gave.
        """
        distribution = self.distribution(self.preprocess(observation))
        action = distribution.sample(noise)
        return action, distribution.log_prob(action)

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw what so many actions need, `[num_rows, ...]`, from an int32 pair."""
        return self._distribution_type.draw_noise(num_rows, self._noise_size, seed)

    def mode(self, observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the most likely action per row; takes and returns what `act` does."""
        del seed  # nothing is drawn
        distribution = self.distribution(self.preprocess(observation))
        action = distribution.mode()
        return action, distribution.log_prob(action)

    def distribution(self, features: Any) -> Distribution:
        """Return the action distribution for preprocessed rows `[N, ...]`."""
        return self._distribution_type(*self._policy(features))

    def distribution_of(self, parameters: Any) -> Distribution:
        """Return the distribution that had these `parameters`."""
        return self._distribution_type(*parameters)

    def value(self, features: Any) -> tf.Tensor:
        """Return the value per preprocessed row, float32 `[N]`."""
        return self._value(features)

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes, policy first."""
        return [*self._policy.trainable_variables, *self._value.trainable_variables]

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        return {
            "policy": tf.train.Checkpoint(**self._policy.trackables),
            "value": tf.train.Checkpoint(**self._value.trackables),
            "preprocess": tf.train.Checkpoint(**self.preprocess.trackables),
        }


def _network_seeds(seed: int) -> tuple[int, int]:
    """Derive one seed per network; layers add their index to it."""
    policy_seed, value_seed = np.random.SeedSequence(seed).generate_state(2) >> 2
    return int(policy_seed), int(value_seed)


def _make_policy(
    space: gymnasium.Space[Any], input_size: int, config: Config, seed: int
) -> tuple[Any, Any]:
    """Choose the policy network and the distribution type for an action space."""
    shared: dict[str, Any] = {
        "hidden_sizes": config.policy_layers,
        "activation": config.activation,
        "seed": seed,
    }
    if isinstance(space, gymnasium.spaces.Box):
        network = GaussianNetwork(
            input_size,
            math.prod(space.shape),
            initial_log_std=config.initial_log_std,
            **shared,
        )
        return network, DiagonalGaussian
    if isinstance(space, gymnasium.spaces.Discrete):
        return CategoricalNetwork(input_size, int(space.n), **shared), Categorical
    raise UnsupportedSpaceError(
        f"Action space: expected Box or Discrete, got {space}; wrap the env so that "
        "its actions are one of these."
    )
