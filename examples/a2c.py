# mypy: allow-untyped-defs, allow-untyped-calls
"""Advantage actor-critic (A2C; Mnih et al. 2016): an algorithm for `ppo train`.

ppo train CartPole-v1 --set algorithm=examples/a2c.py:A2C --set horizon=8
"""

import dataclasses

import keras
import tensorflow as tf

from ppo.agent.normalize import ReturnScale
from ppo.algorithms.algorithm import Algorithm
from ppo.learning.losses import masked_mean, value_loss
from ppo.learning.returns import advantages_and_targets, next_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    step_size: float = 1e-3
    entropy_bonus: float = 0.01


def flat(rows):
    """Reshape rows [T, B, ...] to [T * B, ...]."""
    return tf.reshape(rows, [-1, *rows.shape[2:]])


class A2C(Algorithm):
    settings_type = Settings

    def __init__(self, agent, config, learners):
        super().__init__(agent, config, learners)
        self.optimizer = keras.optimizers.Adam(self.settings.step_size)
        self.optimizer.build(agent.trainable_variables)
        self.return_scale = ReturnScale(config.num_envs, config.discount)
        self.trackables = {
            "optimizer": self.optimizer,
            "return_scale": tf.train.Checkpoint(**self.return_scale.trackables),
        }
        self.update = tf.function(self._update, jit_compile=config.jit_compile)

    def learn(self, rollout, *, progress, seed):
        self.optimizer.learning_rate.assign(self.settings.step_size * (1 - progress))
        self.return_scale.update(rollout.reward, rollout.done, rollout.valid)
        rollout = tf.nest.map_structure(tf.convert_to_tensor, rollout)
        return self.update(rollout, self.return_scale.factor)

    def _update(self, rollout, reward_scale):
        agent, shape = self.agent, [-1, self.config.num_envs]
        features, final_features = (
            agent.preprocess(tf.nest.map_structure(flat, observation))
            for observation in (rollout.observation, rollout.final_observation)
        )
        num_rows = self.config.steps_per_iteration
        inputs = tf.nest.map_structure(lambda rows: rows[:num_rows], features)
        weight = tf.cast(flat(rollout.valid), tf.float32)
        value = tf.reshape(agent.value(features), shape)
        final_value = tf.reshape(agent.value(final_features), shape)
        advantage, target = advantages_and_targets(
            reward=tf.cast(rollout.reward, tf.float32) * reward_scale,
            value=value[:-1],
            next_value=next_values(value, final_value, rollout.done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=rollout.valid,
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        with tf.GradientTape() as tape:
            distribution, value = agent.distribution_and_value(inputs)
            log_prob = distribution.log_prob(flat(rollout.action))
            policy_loss = -masked_mean(log_prob * flat(advantage), weight)
            critic_loss = value_loss(value, flat(target), weight)
            entropy = masked_mean(distribution.entropy(), weight)
            loss = policy_loss + 0.5 * critic_loss
            loss -= self.settings.entropy_bonus * entropy
        variables = agent.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        losses = {"policy_loss": policy_loss, "value_loss": critic_loss}
        return {**losses, "entropy": entropy}
