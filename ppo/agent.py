"""The agent: preprocessor, policy and value network of one pair of spaces.

It acts (`act`, `mode`), judges (`distribution`, `value`) and names everything that a
checkpoint must hold. It does not learn; that is for `ppo.update`.
"""

from typing import Any

import gymnasium
import tensorflow as tf

from ppo.action_kinds import action_kind
from ppo.action_mask import check_mask
from ppo.config import Config
from ppo.distributions import Distribution
from ppo.network_choice import choose_networks
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
        self._actions = action_kind(action_space)
        check_mask(observation_space, action_space, self._actions.choice_sizes)
        self.preprocess = ObservationPreprocessor(
            observation_space,
            normalize=config.normalize_observations,
            clip=config.observation_clip,
        )
        self._networks = choose_networks(
            self.preprocess, self._actions, action_space, config
        )

    def act(self, observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sample an action per row of a raw observation.

        Args:
            observation: raw observation, rows `[N, ...]`.
            seed: int32 pair; the same seed gives the same actions.

        Returns:
            Actions, float32 or int64 `[N, A]` or, if Discrete, int64 `[N]`, and
            log-probabilities `[N]`.
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
        return self._actions.draw_noise(num_rows, seed)

    def mode(self, observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the most likely action per row; takes and returns what `act` does."""
        del seed  # nothing is drawn
        distribution = self.distribution(self.preprocess(observation))
        action = distribution.mode()
        return action, distribution.log_prob(action)

    def distribution(self, features: Any) -> Distribution:
        """Return the action distribution for preprocessed rows `[N, ...]`."""
        inputs, mask = self.preprocess.inputs(features)
        return self._distribution(self._networks.policy_torso(inputs), mask)

    def distribution_of(self, parameters: Any) -> Distribution:
        """Return the distribution that had these `parameters`."""
        distribution: Distribution = self._actions.distribution_type(*parameters)
        return distribution

    def value(self, features: Any) -> tf.Tensor:
        """Return the value per preprocessed row, float32 `[N]`."""
        inputs, _ = self.preprocess.inputs(features)
        return self._networks.value(self._networks.value_torso(inputs))

    def distribution_and_value(self, features: Any) -> tuple[Distribution, tf.Tensor]:
        """Return both; a torso that they share is passed once, also by gradients."""
        networks = self._networks
        inputs, mask = self.preprocess.inputs(features)
        seen = networks.policy_torso(inputs)
        distribution = self._distribution(seen, mask)
        if not networks.is_torso_shared:
            seen = networks.value_torso(inputs)
        return distribution, networks.value(seen)

    def _distribution(self, seen: Any, mask: tf.Tensor | None) -> Distribution:
        distribution: Distribution = self._actions.distribution(
            self._networks.policy(seen), mask
        )
        return distribution

    @property
    def trainable_variables(self) -> list[Any]:
        """The Keras variables that the optimizer changes, the value network's last."""
        parts = self._networks.parts.values()
        return [variable for part in parts for variable in part.trainable_variables]

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        parts = {**self._networks.parts, "preprocess": self.preprocess}
        return {
            name: tf.train.Checkpoint(**part.trackables) for name, part in parts.items()
        }
