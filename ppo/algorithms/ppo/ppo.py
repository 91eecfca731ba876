"""Proximal policy optimisation (Schulman et al. 2017) as an `Algorithm`."""

import logging

import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale
from ppo.algorithms.algorithm import Algorithm
from ppo.algorithms.ppo.load_loss import load_policy_loss
from ppo.algorithms.ppo.update import Updater
from ppo.config.config import Config
from ppo.errors import ConfigError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.rollout import Rollout

__all__ = ["PPO"]

_LOGGER = logging.getLogger("envserve")
#: Deviation of a probability ratio from 1 that rounding cannot cause.
_MAX_RATIO_DEVIATION = 0.1


class PPO(Algorithm):
    """Proximal policy optimisation.

    Attributes:
      updater: Trains the agent on the rollout of an iteration.
      return_scale: Computes the factor that scales rewards: the inverse of the
        running standard deviation of the return.
    """

    supports_several_learners = True

    def __init__(
        self, agent: Agent, config: Config, learners: Learners = SINGLE_LEARNER
    ) -> None:
        super().__init__(agent, config, learners)
        policy_loss = load_policy_loss(config, is_tested=False)
        self.updater = Updater(agent, config, policy_loss, learners)
        self.return_scale = ReturnScale(config.num_envs, config.discount)
        self._has_warned = config.overlap  # the policy that acts then lags behind
        self.trackables = {
            "return_scale": tf.train.Checkpoint(**self.return_scale.trackables),
            **self.updater.trackables,
        }

    @classmethod
    def check(cls, config: Config) -> None:
        """Check the settings, the minibatch size and a custom loss."""
        super().check(config)
        steps, size = config.steps_per_iteration, config.minibatch_size
        if steps % size:
            raise ConfigError(
                "minibatch_size: expected a divisor of num_envs * horizon = "
                f"{steps}, got {size}."
            )
        load_policy_loss(config)

    def learn(
        self, rollout: Rollout, *, progress: float, seed: tuple[int, int]
    ) -> dict[str, float]:
        """Update the reward scale, then train for several epochs on the rollout."""
        # Update the scale first, because `updater` uses it to scale these rewards.
        self.return_scale.update(
            rollout.reward, rollout.done, rollout.valid, self.learners
        )
        metrics = self.updater.update(
            rollout, reward_scale=self.return_scale.factor, progress=progress, seed=seed
        )
        deviation = metrics["ratio_deviation"]
        if deviation > _MAX_RATIO_DEVIATION and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "expected the policy that is updated to be the one that acted, but "
                "their probabilities differ (ratio_deviation = %.2g); the methods "
                "`distribution` and `distribution_from` of the agent must return the "
                "distribution from which `act_from` samples",
                deviation,
            )
        return metrics

    def statistics(self) -> dict[str, float]:
        """Return metrics of the observation normalisation and the reward scale."""
        statistics = super().statistics()
        if self.config.scale_rewards:
            statistics["reward_scale"] = float(self.return_scale.factor)
        return statistics
