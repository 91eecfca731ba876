"""Soft actor-critic (Haarnoja et al. 2018) with an automatic temperature.

Each iteration adds the rollout to the replay buffer, and then takes several gradient
steps in one call of a compiled function. A gradient step trains two critics, the
policy and the temperature, and moves the target networks towards the critics.
"""

import functools
import math
import operator
from pathlib import Path
from typing import Any

import gymnasium
import keras
import numpy as np
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.agent.networks.perceptrons import flatten_observation, mlp
from ppo.algorithms.algorithm import Algorithm
from ppo.algorithms.sac.replay_buffer import ReplayBuffer
from ppo.config.config import Config
from ppo.config.sac import SACSettings
from ppo.errors import ConfigError, DivergedError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.learning.samples import sum_of_steps
from ppo.rollout import Rollout
from ppo.spaces import check_spaces

__all__ = ["SAC"]

METRICS = ("value_loss", "policy_loss", "entropy", "value", "temperature")
"""Means over the gradient steps of an iteration: half the sum of the two critics'
squared errors, the policy loss, the entropy of the policy in nats (of actions scaled to
[-1, 1]), the smaller of the two critics' values, and the temperature."""


class SAC(Algorithm):
    """Soft actor-critic.

    Attributes:
      replay_buffer: The replay buffer, which is saved in separate files.
    """

    settings_type = SACSettings
    settings: SACSettings

    def __init__(
        self, agent: Agent, config: Config, learners: Learners = SINGLE_LEARNER
    ) -> None:
        super().__init__(agent, config, learners)
        num_actions = agent.actions.noise_size
        self.replay_buffer = ReplayBuffer(
            min(self.settings.replay_size, config.total_steps)
        )
        updates = self.settings.updates_per_step * config.steps_per_iteration
        self._num_updates = max(1, round(updates))
        self._target_entropy = self.settings.target_entropy * num_actions
        make_critic = functools.partial(
            mlp,
            agent.preprocess.size + num_actions,
            config.value_layers,
            output_size=1,
            output_gain=1.0,
            activation=config.activation,
        )
        seeds = np.random.SeedSequence(config.seed, spawn_key=(1,)).generate_state(2)
        self._critics, self._target_networks = (
            [make_critic(seed=int(seed >> 2)) for seed in seeds] for _ in range(2)
        )
        self._log_temperature = keras.Variable(
            math.log(self.settings.initial_temperature), dtype="float32"
        )
        self._variables = {
            "critics": [v for net in self._critics for v in net.trainable_variables],
            "policy": agent.policy_variables,
            "temperature": [self._log_temperature],
        }
        self._optimizers = {
            name: keras.optimizers.Adam(config.learning_rate)
            for name in self._variables
        }
        for name, optimizer in self._optimizers.items():
            optimizer.build(self._variables[name])
        self.trackables = {
            "critics": self._critics,
            "targets": self._target_networks,
            "log_temperature": self._log_temperature,
            "optimizers": self._optimizers,
        }
        self._compiled = tf.function(
            self._update, autograph=False, jit_compile=config.jit_compile
        )

    @classmethod
    def check(cls, config: Config) -> None:
        """Check the settings, including the network and `random_steps`."""
        super().check(config)
        if config.recurrent_size or config.network not in ("auto", "mlp"):
            raise ConfigError(
                f"algorithm {config.algorithm}: expected the network mlp without "
                f"recurrence, the only one that SAC supports; got network = "
                f"{config.network} and recurrent_size = {config.recurrent_size}."
            )
        cls.read_settings(config).check(config.planned_steps)

    @classmethod
    def make_agent(
        cls,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: Config,
    ) -> Agent:
        """Return an agent with a squashed Gaussian policy and an unused value function.

        Raises:
          UnsupportedSpaceError: The algorithm does not support a space.
        """
        check_spaces("sac", observation_space, action_space)
        # The config of a user's subclass does not contain the defaults of SAC.
        config = config.replace(
            action_distribution="squashed_gaussian",
            state_dependent_std=True,
            value_layers=(),  # the agent's value function is not used
        )
        return Agent(observation_space, action_space, config)

    def learn(
        self, rollout: Rollout, *, progress: float, seed: tuple[int, int]
    ) -> dict[str, float]:
        """Add a rollout to the replay buffer, then take gradient steps.

        Take no steps until the buffer contains `random_steps` transitions.

        Raises:
          DivergedError: A loss is not finite; the parameters are now unusable.
        """
        self.replay_buffer.add(rollout)
        if self.replay_buffer.size < self.settings.random_steps:
            return {}
        shape = self._num_updates, self.settings.batch_size
        batches = tf.nest.map_structure(
            tf.constant, self.replay_buffer.sample(shape, seed)
        )
        means = self._compiled(batches, tf.constant(seed, tf.int32)).numpy()
        if not np.isfinite(means).all():
            raise DivergedError(
                f"SAC: expected finite losses, got {means}; training has diverged. Try "
                "a lower learning_rate, or smaller rewards."
            )
        return dict(zip(METRICS, means.tolist(), strict=True))

    def statistics(self) -> dict[str, float]:
        """Return metrics of the observation normalisation and the replay buffer."""
        return super().statistics() | {
            "replay_transitions": float(self.replay_buffer.size)
        }

    def save_data(self, folder: Path) -> None:
        """Save the new transitions of the replay buffer, if `save_replay` is set."""
        if self.settings.save_replay:
            self.replay_buffer.save(folder)

    def load_data(self, folder: Path, steps: int) -> None:
        """Fill the replay buffer with the saved transitions."""
        self.replay_buffer.load(folder, steps)

    def _update(self, batches: dict[str, Any], seed: tf.Tensor) -> tf.Tensor:
        """Take one gradient step per batch; return the mean of each of `METRICS`."""
        for optimizer in self._optimizers.values():
            # A checkpoint restores the rate that the run had before it was resumed.
            optimizer.learning_rate.assign(self.config.learning_rate)

        def step(index: tf.Tensor) -> tf.Tensor:
            batch = tf.nest.map_structure(operator.itemgetter(index), batches)
            step_seed = tf.random.experimental.stateless_fold_in(seed, index)
            return self._gradient_step(batch, step_seed)

        total = sum_of_steps(step, self._num_updates, len(METRICS))
        return total / self._num_updates

    def _gradient_step(self, batch: dict[str, Any], seed: tf.Tensor) -> tf.Tensor:
        agent = self.agent
        features = agent.preprocess(batch["observation"])
        size = [2, self.settings.batch_size, agent.actions.noise_size]
        noise, next_noise = tf.unstack(tf.random.stateless_normal(size, seed))
        temperature = tf.exp(self._log_temperature.value)

        target = self._target(batch, next_noise, temperature)
        with tf.GradientTape() as tape:
            values = self._values(self._critics, features, tf.tanh(batch["action"]))
            errors = [tf.reduce_mean(tf.square(value - target)) for value in values]
            value_loss = 0.5 * (errors[0] + errors[1])
        self._apply("critics", tape, value_loss)

        with tf.GradientTape() as tape:
            policy = agent.distribution(features)
            # Like all actions of the agent, these are not squashed by tanh yet.
            action = policy.sample(noise)
            log_prob = policy.log_prob(action)
            values = self._values(self._critics, features, tf.tanh(action))
            value = tf.minimum(*values)
            policy_loss = tf.reduce_mean(temperature * log_prob - value)
        self._apply("policy", tape, policy_loss)

        entropy = -tf.reduce_mean(log_prob)
        # This is the gradient of the temperature loss.
        gradient = entropy - self._target_entropy
        self._optimizers["temperature"].apply([gradient], [self._log_temperature])

        for critic, target_network in zip(
            self._critics, self._target_networks, strict=True
        ):
            pairs = zip(critic.variables, target_network.variables, strict=True)
            for new, old in pairs:
                old.assign_add(self.settings.tau * (new.value - old.value))
        mean_value = tf.reduce_mean(value)
        return tf.stack([value_loss, policy_loss, entropy, mean_value, temperature])

    def _target(
        self, batch: dict[str, Any], noise: tf.Tensor, temperature: tf.Tensor
    ) -> tf.Tensor:
        """Return the target of the critics: reward + discount * next value.

        The next value is min Q - temperature * log pi of the next observation, or 0 if
        the episode was terminated. If the episode was truncated, the next observation
        of the transition is the final observation.
        """
        features = self.agent.preprocess(batch["next_observation"])
        policy = self.agent.distribution(features)
        action = policy.sample(noise)
        values = self._values(self._target_networks, features, tf.tanh(action))
        value = tf.minimum(*values) - temperature * policy.log_prob(action)
        value = tf.where(batch["terminated"], 0.0, value)
        return batch["reward"] + self.config.discount * value

    def _values(
        self, critics: list[Any], features: Any, action: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the values `[N]` that each critic assigns to actions in [-1, 1]."""
        inputs, _ = self.agent.preprocess.inputs(features)
        rows = tf.concat([flatten_observation(inputs), action], axis=1)
        return [tf.squeeze(critic(rows), axis=1) for critic in critics]

    def _apply(self, name: str, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = self._variables[name]
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        self._optimizers[name].apply(gradients, variables)
