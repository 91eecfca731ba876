"""The learning step: epochs of minibatches over one rollout, compiled as a whole.

Shapes are static throughout. Rows that are not valid have weight 0 everywhere and
their content is replaced before any arithmetic, so it changes nothing.
"""

import operator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ppo import losses
from ppo.agent import Agent
from ppo.config import Config
from ppo.returns import advantages_and_targets, next_values
from ppo.simulate import Rollout

__all__ = ["METRICS", "Updater"]

METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approximate_kl",
    "clip_fraction",
    "gradient_norm",
)
"""Minibatch diagnostics, averaged over the last epoch."""


class Updater:
    """Improves an agent by PPO.

    Args:
        agent: whose networks are changed.
        config: sizes and coefficients. Without `jit_compile` the same graph runs as
            plain TensorFlow, with other random numbers for the shuffling.
    """

    def __init__(self, agent: Agent, config: Config) -> None:
        self._agent = agent
        self._config = config
        self._variables = agent.trainable_variables
        self.optimizer = keras.optimizers.Adam(
            config.learning_rate, epsilon=config.adam_epsilon
        )
        self.optimizer.build(self._variables)
        self._compiled = tf.function(self._update, jit_compile=config.jit_compile)

    @property
    def num_traces(self) -> int:
        """How often the update has been traced; each time is a compilation."""
        return int(self._compiled.experimental_get_tracing_count())

    def update(
        self,
        rollout: Rollout,
        *,
        reward_scale: Any = 1.0,
        progress: float = 0.0,
        seed: tuple[int, int],
    ) -> dict[str, float]:
        """Take `epochs` passes over a rollout.

        Args:
            rollout: what the agent collected with its present parameters.
            reward_scale: what rewards are multiplied by.
            progress: share of the training that is over, in [0, 1); moves the decays.
            seed: decides the shuffling.

        Returns:
            `METRICS`, and `ratio_deviation` (largest distance of a probability ratio
            from 1 before the first gradient step: more than 1e-3 means a defect) and
            `explained_variance` of the values before the update.
        """
        config = self._config
        remaining = 1.0 - progress
        rate = config.learning_rate * (remaining if config.decay_learning_rate else 1)
        clip = config.clip_range * (remaining if config.decay_clip_range else 1)
        batch = tf.nest.map_structure(tf.convert_to_tensor, rollout)
        values = self._compiled(
            batch,
            tf.cast(reward_scale, tf.float32),
            tf.constant(rate, tf.float32),
            tf.constant(clip, tf.float32),
            tf.constant(seed, tf.int32),
        )
        names = (*METRICS, "ratio_deviation", "explained_variance")
        numbers = np.asarray(values, np.float64)
        return dict(zip(names, numbers.tolist(), strict=True))

    def _update(
        self,
        rollout: Rollout,
        reward_scale: tf.Tensor,
        learning_rate: tf.Tensor,
        clip_range: tf.Tensor,
        seed: tf.Tensor,
    ) -> tf.Tensor:
        config = self._config
        self.optimizer.learning_rate.assign(learning_rate)
        features, final_features = self._preprocess(rollout)
        samples = self._samples(rollout, features)
        reward = self._scaled_reward(rollout, reward_scale)
        judged = self._judge(rollout, features, final_features, reward)
        first_look = self._first_look(rollout, features, samples, judged)
        metrics = tf.zeros([len(METRICS)])
        for epoch in tf.range(config.epochs):
            if config.recompute_advantages:
                judged = self._judge(rollout, features, final_features, reward)
            epoch_seed = tf.random.experimental.stateless_fold_in(seed, epoch)
            metrics = self._epoch(samples | judged, clip_range, epoch_seed)
        return tf.concat([metrics, first_look], axis=0)

    def _epoch(
        self, samples: dict[str, Any], clip_range: tf.Tensor, seed: tf.Tensor
    ) -> tf.Tensor:
        """Take one gradient step per minibatch; returns the mean of the metrics."""
        size = self._config.minibatch_size
        count = self._config.steps_per_iteration // size
        # Not stateless_shuffle: XLA cannot compile it.
        order = tf.argsort(tf.random.stateless_uniform([count * size], seed))
        minibatches = tf.nest.map_structure(
            lambda rows: tf.reshape(
                tf.gather(rows, order), [count, size, *rows.shape[1:]]
            ),  # [T * B, ...] -> [count, size, ...]
            samples,
        )
        total = tf.zeros([len(METRICS)])
        for index in tf.range(count):
            minibatch = tf.nest.map_structure(operator.itemgetter(index), minibatches)
            total += self._gradient_step(minibatch, clip_range)
        return total / count

    def _gradient_step(
        self, minibatch: dict[str, Any], clip_range: tf.Tensor
    ) -> tf.Tensor:
        config = self._config
        weight = minibatch["weight"]
        advantage = minibatch["advantage"]
        if config.normalize_advantages:
            advantage = losses.normalized_advantages(advantage, weight)
        with tf.GradientTape() as tape:
            distribution = self._agent.distribution(minibatch["features"])
            log_prob = distribution.log_prob(minibatch["action"])
            log_ratio = (log_prob - minibatch["log_prob"]) * weight
            policy_loss = losses.policy_loss(log_ratio, advantage, weight, clip_range)
            value = self._agent.value(minibatch["features"])
            value_loss = losses.value_loss(value, minibatch["target"], weight)
            entropy = losses.masked_mean(distribution.entropy(), weight)
            loss = (
                policy_loss
                + config.value_coefficient * value_loss
                - config.entropy_coefficient * entropy
            )
        gradients = tape.gradient(loss, [v.value for v in self._variables])
        gradients, norm = tf.clip_by_global_norm(gradients, config.max_gradient_norm)
        self.optimizer.apply(gradients, self._variables)
        kl = losses.approximate_kl(log_ratio, weight)
        clipped = losses.clip_fraction(log_ratio, weight, clip_range)
        return tf.stack([policy_loss, value_loss, entropy, kl, clipped, norm])

    def _preprocess(self, rollout: Rollout) -> tuple[Any, Any]:
        """Return network inputs `[(T + 1) * B, ...]` and `[T * B, ...]`."""
        return (
            self._agent.preprocess(tf.nest.map_structure(_flat, rollout.observation)),
            self._agent.preprocess(
                tf.nest.map_structure(_flat, rollout.final_observation)
            ),
        )

    def _samples(self, rollout: Rollout, features: Any) -> dict[str, Any]:
        """Collect what does not change between epochs, rows `[T * B, ...]`."""
        valid = _flat(rollout.valid)
        count = self._config.steps_per_iteration
        return {
            "features": tf.nest.map_structure(
                lambda rows: _zero_unless(valid, rows[:count]), features
            ),
            "action": _zero_unless(valid, _flat(rollout.action)),
            "log_prob": _zero_unless(valid, _flat(rollout.log_prob)),
            "weight": tf.cast(valid, tf.float32),
        }

    def _scaled_reward(self, rollout: Rollout, scale: tf.Tensor) -> tf.Tensor:
        reward = tf.cast(rollout.reward, tf.float32)
        if not self._config.scale_rewards:
            return reward
        limit = self._config.reward_clip
        return tf.clip_by_value(reward * scale, -limit, limit)

    def _judge(
        self, rollout: Rollout, features: Any, final_features: Any, reward: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Compute advantages and targets, rows `[T * B]`, with the present values."""
        config = self._config
        shape = [-1, config.num_envs]
        value = tf.reshape(self._agent.value(features), shape)
        final_value = tf.reshape(self._agent.value(final_features), shape)
        done = rollout.terminated | rollout.truncated
        advantage, target = advantages_and_targets(
            reward=reward,
            value=value[:-1],
            next_value=next_values(value, final_value, done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=rollout.valid,
            discount=config.discount,
            gae_lambda=config.gae_lambda,
        )
        return {"advantage": _flat(advantage), "target": _flat(target)}

    def _first_look(
        self,
        rollout: Rollout,
        features: Any,
        samples: dict[str, Any],
        judged: dict[str, tf.Tensor],
    ) -> tf.Tensor:
        """Compare the agent, before any gradient step, with what it collected."""
        weight = samples["weight"]
        distribution = self._agent.distribution(samples["features"])
        log_ratio = distribution.log_prob(samples["action"]) - samples["log_prob"]
        deviation = tf.reduce_max(tf.abs(tf.exp(log_ratio * weight) - 1.0))
        value = self._agent.value(features)[: self._config.steps_per_iteration]
        value = _zero_unless(_flat(rollout.valid), value)
        explained = losses.explained_variance(value, judged["target"], weight)
        return tf.stack([deviation, explained])


def _flat(rows: tf.Tensor) -> tf.Tensor:
    return tf.reshape(rows, [-1, *rows.shape[2:]])  # [T, B, ...] -> [T * B, ...]


def _zero_unless(valid: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    mask = tf.reshape(valid, [-1] + [1] * (len(rows.shape) - 1))
    return tf.where(mask, rows, tf.zeros_like(rows))
