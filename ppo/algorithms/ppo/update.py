"""The PPO update: several epochs of minibatches over one rollout, compiled with XLA.

All shapes are static. Invalid rows have weight 0, and their contents are replaced with
zeros before any arithmetic, so they do not affect the result.
"""

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.text import one_line
from ppo.agent.agent import Agent
from ppo.algorithms.ppo.schedules import Coefficients, Schedules
from ppo.algorithms.ppo.trust_region import (
    EpochRollback,
    clip_by_network,
    make_optimizer,
)
from ppo.config.config import Config
from ppo.errors import ConfigError, DivergedError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.learning import losses
from ppo.learning.returns import advantages_and_targets, next_values
from ppo.learning.samples import SequenceSampler, StepSampler, sum_of_steps
from ppo.rollout import Rollout

METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approximate_kl",
    "clip_fraction",
    "gradient_norm",
)
"""Minibatch diagnostics, averaged over the valid rows of the last epoch. After a
rollback, `value_loss` and `gradient_norm` are those of the last epoch. The others are
those of the last epoch that was not rolled back (of the first epoch if there is none).
"""

_POLICY_METRICS = tuple(name not in {"value_loss", "gradient_norm"} for name in METRICS)


class Updater:
    """Trains an agent with PPO.

    Args:
      agent: Agent to train.
      config: Settings, in which `num_envs` and `minibatch_size` are this learner's
        share. Without `jit_compile`, the same graph runs as plain TensorFlow, but
        shuffles with different random numbers.
      policy_loss: Loss function of the policy; see `ppo.algorithms.ppo.load_loss`.
      learners: Group of learners; each computes its share of every minibatch.

    Attributes:
      trackables: Maps names to the objects that a checkpoint must store.
    """

    def __init__(
        self,
        agent: Agent,
        config: Config,
        policy_loss: Callable[..., tf.Tensor] = losses.policy_loss,
        learners: Learners = SINGLE_LEARNER,
    ) -> None:
        self._agent = agent
        self._learners = learners
        self._config = config
        self._policy_loss = policy_loss
        self._sampler = (SequenceSampler if agent.cores else StepSampler)(agent, config)
        self._variables = agent.trainable_variables
        self.optimizer = make_optimizer(config)
        self.optimizer.build(self._variables)
        policy = agent.policy_variables
        self._rollback = EpochRollback(policy, self.optimizer)
        # If all variables belong to the policy, a rolled-back epoch ends the update.
        # Otherwise, the value function continues to learn.
        self._has_separate_value = len(policy) < len(self._variables)
        is_policy = [any(v is other for other in policy) for v in self._variables]
        # Indices of the policy's variables, and of all others.
        self._network_indices = [
            [index for index, value in enumerate(is_policy) if value is is_in_policy]
            for is_in_policy in (True, False)
            if is_in_policy in is_policy
        ]
        self._schedules = Schedules(config)
        self.trackables: dict[str, Any] = {
            "optimizer": self.optimizer,
            "schedules": tf.train.Checkpoint(**self._schedules.trackables),
        }
        can_compile = config.jit_compile and learners.num == 1  # see `_jit`
        # AutoGraph converts only calls of a user's network; see `_jit`.
        self._compiled = tf.function(
            self._update, autograph=False, jit_compile=can_compile
        )

    def update(
        self,
        rollout: Rollout,
        *,
        reward_scale: Any = 1.0,
        progress: float = 0.0,
        seed: tuple[int, int],
    ) -> dict[str, float]:
        """Train for up to `epochs` epochs on a rollout.

        Args:
          rollout: Rollout collected by the agent with its current parameters.
          reward_scale: Factor to multiply rewards by.
          progress: Fraction of the run that is complete, in [0, 1).
          seed: Seed of the shuffling.

        Returns:
          A dict of metrics: `METRICS`; `ratio_deviation`, the largest distance of a
          probability ratio from 1 before the first gradient step (more than 1e-3
          indicates a bug); `explained_variance` of the values before the update;
          `epochs_run`, the number of epochs that trained the policy; `undone_epochs`
          (0 or 1); `kl`, KL(old || new) after the update; and the `learning_rate`.
          With a KL penalty, also the `kl_penalty`.

        Raises:
          ConfigError: XLA cannot compile a user's network or loss.
          DivergedError: A gradient was not finite; the parameters are now unusable.
        """
        config = self._config
        coefficients = self._schedules.at(progress)
        batch = tf.nest.map_structure(tf.convert_to_tensor, rollout)
        with _compilation_errors():
            tensors = self._compiled(
                batch,
                tf.cast(reward_scale, tf.float32),
                tf.nest.map_structure(
                    lambda number: tf.constant(number, tf.float32), coefficients
                ),
                tf.constant(seed, tf.int32),
            )
        metrics = {name: float(value) for name, value in tensors.items()}
        norm = metrics["gradient_norm"]
        # Non-finite gradients make all later gradients non-finite, so checking the last
        # epoch is sufficient. After a rollback, however, the parameters are finite
        # again, and only the second moments of the optimizer show the divergence.
        if metrics["undone_epochs"] and not all(
            np.isfinite(variable).all() for variable in self.optimizer.variables
        ):
            norm = math.nan
        if not math.isfinite(norm):
            raise DivergedError(
                f"Update: expected a finite gradient norm, got {norm}; training has "
                "diverged. Try a lower learning_rate, or smaller rewards."
            )
        metrics["learning_rate"] = coefficients.learning_rate
        if config.penalizes_kl:
            metrics["kl_penalty"] = coefficients.kl_penalty
        # If the first epoch was rolled back, the policy is unchanged, so the KL is 0.
        # The schedules must nevertheless react as if it had moved too far.
        has_moved = metrics["epochs_run"] > 0
        self._schedules.update(metrics["kl"] if has_moved else math.inf)
        return metrics

    def _jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a part of the update; with several learners, compile it on its own.

        The part must not communicate between learners, because XLA cannot compile
        all-reduce operations on CPUs. With a single learner, the whole update is
        compiled instead. If the part calls a user's network, AutoGraph converts it.
        """
        converts = self._agent.converts_code
        if self._learners.num == 1 and not converts:
            return function
        jit_compile = self._config.jit_compile
        return tf.function(function, autograph=converts, jit_compile=jit_compile)

    def _update(
        self,
        rollout: Rollout,
        reward_scale: tf.Tensor,
        coefficients: Coefficients,
        seed: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Train on the rollout, and return a dict of metrics."""
        config = self._config
        self.optimizer.learning_rate.assign(coefficients.learning_rate)
        samples, inputs, advantages, (value, deviation) = self._jit(self._prepare)(
            rollout, reward_scale
        )
        # These metrics describe the networks before the first gradient step.
        first_metrics = {
            "ratio_deviation": self._learners.max(deviation),
            "explained_variance": losses.explained_variance(
                value, advantages["target"], samples["weight"], self._mean
            ),
        }

        def continues(epoch: tf.Tensor, is_too_far: tf.Tensor, *_: Any) -> tf.Tensor:
            remains = epoch < config.epochs
            return remains if self._has_separate_value else remains & ~is_too_far

        def run_epoch(
            epoch: tf.Tensor,
            is_too_far: tf.Tensor,
            num_epochs: tf.Tensor,
            kl: tf.Tensor,
            metrics: tf.Tensor,
        ) -> tuple[tf.Tensor, ...]:
            epoch_advantages = advantages
            if config.recompute_advantages:
                _, epoch_advantages = self._jit(self._advantages)(rollout, *inputs)
            before = self._rollback.save()
            epoch_seed = tf.random.experimental.stateless_fold_in(seed, epoch)
            epoch_metrics = self._epoch(
                samples | epoch_advantages, coefficients, epoch_seed
            )
            epoch_kl = self._mean_kl(samples)
            if config.max_kl > 0:
                is_too_far |= ~(epoch_kl <= config.max_kl)
                self._rollback.restore(before, is_too_far)
            keep_metrics = is_too_far & (epoch > 0) & _POLICY_METRICS
            return (
                epoch + 1,
                is_too_far,
                num_epochs + tf.cast(~is_too_far, tf.int32),
                tf.where(is_too_far, kl, epoch_kl),
                tf.where(keep_metrics, metrics, epoch_metrics),
            )

        zero = tf.constant(0)
        _, is_too_far, num_epochs, kl, metrics = tf.while_loop(
            continues,
            run_epoch,
            (zero, tf.constant(False), zero, tf.zeros([]), tf.zeros([len(METRICS)])),
        )
        return {
            **dict(zip(METRICS, tf.unstack(metrics), strict=True)),
            **first_metrics,
            "epochs_run": num_epochs,
            "undone_epochs": is_too_far,
            "kl": kl,
        }

    def _prepare(self, rollout: Rollout, reward_scale: tf.Tensor) -> tuple[Any, ...]:
        """Prepare the rollout for learning.

        Returns:
          * The samples.
          * The features, final features and rewards, as arguments for `_advantages`.
          * The advantages and targets, the dict that `_advantages` returns.
          * The value of each sample, and the metric `ratio_deviation`, as a pair.
        """
        features, final_features = [
            self._agent.preprocess(tf.nest.map_structure(_flat, observation))
            for observation in (rollout.observation, rollout.final_observation)
        ]  # [(T + 1) * B, ...] and [T * B, ...]
        samples = self._samples(rollout, features)
        reward = tf.cast(rollout.reward, tf.float32)
        if self._config.scale_rewards:
            limit = self._config.reward_clip
            reward = tf.clip_by_value(reward * reward_scale, -limit, limit)
        inputs = features, final_features, reward
        value, advantages = self._advantages(rollout, *inputs)
        distribution = self._sampler.distribution(samples)
        log_ratio = distribution.log_prob(samples["action"]) - samples["log_prob"]
        ratio = tf.exp(log_ratio * samples["weight"])
        deviation = tf.reduce_max(tf.abs(ratio - 1.0))
        value = self._sampler.reorder(
            _zero_unless(_flat(rollout.valid), _flat(value[:-1]))
        )
        return samples, inputs, advantages, (value, deviation)

    def _mean(self, values: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Return the mean over the valid rows of all learners."""
        mean = losses.masked_mean(values, weight)
        return self._learners.mean(mean, tf.reduce_sum(weight))

    def _mean_kl(self, samples: dict[str, Any]) -> tf.Tensor:
        """Return the mean KL(old || new) over the valid rows of all learners."""
        return self._mean(self._jit(self._kl)(samples), samples["weight"])

    def _kl(self, samples: dict[str, Any]) -> tf.Tensor:
        old = self._agent.distribution_from(samples["old_policy"])
        new = self._sampler.distribution(samples)
        return old.kl(new)

    def _epoch(
        self, samples: dict[str, Any], coefficients: Coefficients, seed: tf.Tensor
    ) -> tf.Tensor:
        """Take one gradient step per minibatch.

        Returns:
          The mean of each metric over the valid rows, in the order of `METRICS`.
        """
        config = self._config
        count = config.steps_per_iteration // config.minibatch_size
        minibatches = self._sampler.minibatches(samples, count, seed)
        num_valid = self._learners.sum(tf.reduce_sum(minibatches["weight"], axis=1))

        def step(index: tf.Tensor) -> tf.Tensor:
            minibatch = tf.nest.map_structure(operator.itemgetter(index), minibatches)
            return num_valid[index] * self._gradient_step(minibatch, coefficients)

        total = sum_of_steps(step, count, len(METRICS))
        return total / tf.maximum(tf.reduce_sum(num_valid), 1.0)

    def _gradient_step(
        self, minibatch: dict[str, Any], coefficients: Coefficients
    ) -> tf.Tensor:
        config, weight = self._config, minibatch["weight"]
        if config.normalize_advantages:
            advantage = minibatch["advantage"]
            advantage = losses.normalized_advantages(advantage, weight, self._mean)
            minibatch = minibatch | {"advantage": advantage}
        if config.penalizes_kl and self._learners.num > 1:
            minibatch = minibatch | {"kl": self._mean_kl(minibatch)}
        gradients, metrics = self._learners.mean(
            self._jit(self._gradients)(minibatch, coefficients), tf.reduce_sum(weight)
        )
        metrics["gradient_norm"] = self._jit(self._apply)(gradients)
        return tf.stack([metrics[name] for name in METRICS])

    def _apply(self, gradients: list[tf.Tensor]) -> tf.Tensor:
        """Apply the gradients, and return their global norm before clipping."""
        gradients, norm = clip_by_network(
            gradients, self._network_indices, self._config.max_gradient_norm
        )
        # An optimizer with loss scaling divides the gradients by its scale.
        scaled = [g if g is None else self.optimizer.scale_loss(g) for g in gradients]
        self.optimizer.apply(scaled, self._variables)
        return norm

    def _gradients(
        self, minibatch: dict[str, Any], coefficients: Coefficients
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Return the gradients, and a dict of all `METRICS` except `gradient_norm`."""
        config = self._config
        clip_range = coefficients.clip_range
        # Use a Python number if the coefficient is constant: if it is 0, XLA omits the
        # entropy gradient.
        entropy_coefficient = (
            coefficients.entropy
            if config.decay_entropy_coefficient
            else config.entropy_coefficient
        )
        weight = minibatch["weight"]
        with tf.GradientTape() as tape:
            distribution, value = self._sampler.distribution_and_value(minibatch)
            log_prob = distribution.log_prob(minibatch["action"])
            log_ratio = (log_prob - minibatch["log_prob"]) * weight
            old = self._agent.distribution_from(minibatch["old_policy"])
            policy_loss = self._policy_loss(
                log_ratio=log_ratio,
                advantage=minibatch["advantage"],
                weight=weight,
                clip_range=clip_range if config.clips_ratios else None,
                **{"old": old, "new": distribution, "action": minibatch["action"]},
                **{"value": value, "target": minibatch["target"]},
                observation=self._agent.preprocess.inputs(minibatch["features"])[0],
                model=self._agent.custom_model,
            )
            if config.penalizes_kl:
                kl = losses.masked_mean(old.kl(distribution), weight)
                if "kl" in minibatch:
                    # The penalty depends on the mean KL over all learners, but its
                    # gradient is that of this learner.
                    kl += tf.stop_gradient(minibatch["kl"] - kl)
                policy_loss += losses.kl_penalty_loss(
                    kl,
                    coefficients.kl_penalty,
                    cutoff=config.kl_cutoff_factor * config.kl_target,
                    cutoff_coefficient=config.kl_cutoff_coefficient,
                )
            value_loss = losses.value_loss(
                value,
                minibatch["target"],
                weight,
                old_value=minibatch.get("old_value"),
                clip_range=config.value_clip_range or None,
            )
            entropy = losses.masked_mean(distribution.entropy(), weight)
            loss = (
                policy_loss
                + config.value_coefficient * value_loss
                - entropy_coefficient * entropy
            )
        gradients = [
            # A user's network may have variables that the loss does not depend on, with
            # another dtype, or with sparse gradients, which XLA cannot apply.
            None if part is None else tf.cast(tf.convert_to_tensor(part), tf.float32)
            for part in tape.gradient(loss, [v.value for v in self._variables])
        ]
        return gradients, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approximate_kl": losses.approximate_kl(log_ratio, weight),
            "clip_fraction": losses.clip_fraction(log_ratio, weight, clip_range),
        }

    def _samples(self, rollout: Rollout, features: Any) -> dict[str, Any]:
        """Return a dict of the tensors `[T * B, ...]` that all epochs share.

        Their rows are in the order of the samples.
        """
        valid = _flat(rollout.valid)
        is_used = _flat(self._sampler.uses_observation(rollout))
        count = self._config.steps_per_iteration
        samples = {
            "features": tf.nest.map_structure(
                lambda rows: _zero_unless(is_used, rows[:count]), features
            ),
            "action": _zero_unless(valid, _flat(rollout.action)),
            "log_prob": _zero_unless(valid, _flat(rollout.log_prob)),
            "weight": tf.cast(valid, tf.float32),
        }
        samples = tf.nest.map_structure(self._sampler.reorder, samples)
        samples |= self._sampler.recurrent_inputs(rollout)
        samples["old_policy"] = self._sampler.distribution(samples).parameters
        if self._config.value_clip_range > 0:
            _, samples["old_value"] = self._sampler.distribution_and_value(samples)
        return samples

    def _advantages(
        self, rollout: Rollout, features: Any, final_features: Any, reward: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return values, and a dict of advantages and targets.

        The values `[T + 1, B]` are in the order of the rollout; the advantages and
        targets `[T * B]` are in the order of the samples.
        """
        config = self._config
        value, final_value = self._sampler.values(rollout, features, final_features)
        advantage, target = advantages_and_targets(
            reward=reward,
            value=value[:-1],
            next_value=next_values(value, final_value, rollout.done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=rollout.valid,
            discount=config.discount,
            gae_lambda=config.gae_lambda,
        )
        reorder = self._sampler.reorder
        return value, {
            "advantage": reorder(_flat(advantage)),
            "target": reorder(_flat(target)),
        }


@contextlib.contextmanager
def _compilation_errors() -> Iterator[None]:
    """Raise a `ConfigError` if XLA cannot compile a user's network or loss."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "XLA" not in error.message:
            raise
        text = re.sub(r"\[_XlaMustCompile.*?\]", "", " ".join(error.message.split()))
        raise ConfigError(
            "jit_compile: expected a network and a loss that XLA can compile; "
            f"{one_line(text, 300)}; remove such operations, or set jit_compile=false."
        ) from error


def _flat(rows: tf.Tensor) -> tf.Tensor:
    return tf.reshape(rows, [-1, *rows.shape[2:]])  # [T, B, ...] -> [T * B, ...]


def _zero_unless(valid: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    mask = tf.reshape(valid, [-1] + [1] * (len(rows.shape) - 1))
    return tf.where(mask, rows, tf.zeros_like(rows))
