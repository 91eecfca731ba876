"""The agent: preprocessor, policy and value network of one pair of spaces.

It acts (`act`, `mode`), judges (`distribution`, `value`) and names everything that a
checkpoint must hold. It does not learn; that is for `ppo.learning.update`.
"""

from typing import Any

import gymnasium
import keras
import tensorflow as tf

from ppo.agent.actions.action_spaces import make_action_adapter
from ppo.agent.actions.distributions import Distribution
from ppo.agent.networks.build import build_networks
from ppo.agent.observations import ObservationPreprocessor
from ppo.config.config import Config


class Agent:
    """Policy and value function for an observation space and an action space.

    With `recurrent_size` each of the two has a memory, and its heads take what that
    gives in place of features. Whoever acts then holds the states: `[N, units]` of the
    policy's memory and, where values are wanted as well, of the value's.

    Attributes:
        actions: what policy and envs call an action.
        preprocess: turns raw observations into features.
        memories: that of the policy and that of the value; none without recurrence.
        state_sizes: Units of each of the memories.
        trainable_variables: The Keras variables that the optimizer changes; those of
            the memories last.
        trackables: Objects that a checkpoint must store, by name.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: Config,
    ) -> None:
        self.actions = make_action_adapter(action_space, config)
        self.actions.check_mask(observation_space)
        self.preprocess = ObservationPreprocessor(
            observation_space,
            normalize=config.normalize_observations,
            clip=config.observation_clip,
        )
        self._networks = build_networks(self.preprocess, self.actions, config)
        self.memories = self._networks.memories
        self.state_sizes = tuple(memory.units for memory in self.memories)
        parts = self._networks.parts
        self.trainable_variables: list[Any] = [
            variable for part in parts.values() for variable in part.trainable_variables
        ]
        self.trackables = {
            name: tf.train.Checkpoint(**part.trackables)
            for name, part in {**parts, "preprocess": self.preprocess}.items()
        }

    def act(
        self, observation: Any, seed: tf.Tensor, *state: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Sample an action per row of a raw observation.

        Args:
            observation: raw observation, rows `[N, ...]`.
            seed: int32 pair; the same seed gives the same actions.
            state: with recurrence, float32 `[N, units]` of the policy's memory, or of
                both; zero where an episode begins.

        Returns:
            Actions, float32 or int64 `[N, A]` or, if Discrete, int64 `[N]`, and
            log-probabilities `[N]`, then the states after this observation.
        """
        rows = tf.nest.flatten(observation)[0]
        num_rows = rows.shape[0] or tf.shape(rows)[0]  # the latter in exported graphs
        noise = self.actions.noise(num_rows, seed)
        distribution, state = self._policy_step(observation, state)
        action = distribution.sample(noise)
        return action, distribution.log_prob(action), *state

    def snapshot(self) -> Any:
        """Return all that actions depend on, as tensors that learning leaves alone."""
        values = [tf.identity(variable.value) for variable in self.trainable_variables]
        return values, self.preprocess.scales()

    def act_from(
        self, snapshot: Any, observation: Any, noise: tf.Tensor, *state: tf.Tensor
    ) -> tuple[Any, ...]:
        """Sample as `act` does, as the agent was when `snapshot` was taken.

        It takes N rows of what `actions.noise` gave in place of a seed, and
        returns the distribution's parameters in place of log-probabilities; what takes
        `log_prob` of many steps at once is sooner done.
        """
        values, scales = snapshot
        variables = self.trainable_variables
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            distribution, state = self._policy_step(observation, state, scales)
        return distribution.sample(noise), distribution.parameters, *state

    def log_prob(self, action: tf.Tensor, parameters: Any) -> tf.Tensor:
        """Return log-probabilities `[N]` of actions, given their distributions'."""
        return self.distribution_from(parameters).log_prob(action)

    def mode(
        self, observation: Any, seed: tf.Tensor, *state: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Return the most likely action per row; takes and returns what `act` does."""
        del seed  # nothing is drawn
        distribution, state = self._policy_step(observation, state)
        action = distribution.mode()
        return action, distribution.log_prob(action), *state

    def distribution(
        self, features: Any, memory_output: tf.Tensor | None = None
    ) -> Distribution:
        """Return the action distribution for preprocessed rows `[N, ...]`.

        With recurrence, `remembered` is what the policy's memory gave, `[N, units]`.
        """
        inputs, mask = self.preprocess.inputs(features)
        if memory_output is None:
            memory_output = self._networks.policy_torso(inputs)
        return self._distribution(memory_output, mask)

    def distribution_from(self, parameters: Any) -> Distribution:
        """Return the distribution that had these `parameters`."""
        return self.actions.distribution_type(*parameters)

    def value(self, features: Any, memory_output: tf.Tensor | None = None) -> tf.Tensor:
        """Return the value per preprocessed row, float32 `[N]`.

        With recurrence, `remembered` is what the value's memory gave, `[N, units]`.
        """
        if memory_output is None:
            inputs, _ = self.preprocess.inputs(features)
            memory_output = self._networks.value_torso(inputs)
        return self._networks.value(memory_output)

    def distribution_and_value(self, features: Any) -> tuple[Distribution, tf.Tensor]:
        """Return both; a torso that they share is passed once, also by gradients."""
        networks = self._networks
        inputs, mask = self.preprocess.inputs(features)
        seen = networks.policy_torso(inputs)
        distribution = self._distribution(seen, mask)
        if not networks.is_torso_shared:
            seen = networks.value_torso(inputs)
        return distribution, networks.value(seen)

    def embed(self, features: Any, count: int = 2) -> list[tf.Tensor]:
        """Return what memories take of preprocessed rows `[N, ...]`: `[N, D]` each.

        A count of 1 is for the policy's memory, 2 for the value's as well; a torso that
        they share is passed once.
        """
        networks = self._networks
        inputs, _ = self.preprocess.inputs(features)
        seen = networks.policy_torso(inputs)
        embeddings = [self.memories[0].embed(seen)]
        if count > 1:
            if not networks.is_torso_shared:
                seen = networks.value_torso(inputs)
            embeddings.append(self.memories[1].embed(seen))
        return embeddings

    def _policy_step(
        self, observation: Any, state: tuple[tf.Tensor, ...], scales: Any = None
    ) -> tuple[Distribution, tuple[tf.Tensor, ...]]:
        """Return what to draw actions from, and the states after the observation."""
        features = self.preprocess(observation, scales)
        if not self.memories:
            return self.distribution(features), ()
        embeddings = self.embed(features, len(state))
        state = tuple(
            memory.advance(embedding, part)
            for memory, embedding, part in zip(
                self.memories, embeddings, state, strict=False
            )
        )
        return self.distribution(features, state[0]), state

    def _distribution(self, torso_output: Any, mask: tf.Tensor | None) -> Distribution:
        return self.actions.distribution(self._networks.policy(torso_output), mask)

    @property
    def policy_variables(self) -> list[Any]:
        """Trainable variables of the policy; all if it shares any with the value."""
        parts = self._networks.parts
        if "torso" in parts:
            return self.trainable_variables
        names = [name for name in parts if name.startswith("policy")]
        return [each for name in names for each in parts[name].trainable_variables]
