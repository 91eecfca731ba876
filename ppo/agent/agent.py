"""The agent: observation preprocessor, policy and value function.

An agent samples actions, computes action distributions and values, and lists the
variables that a checkpoint must store. The algorithms in `ppo.algorithms` train it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import keras
import numpy as np
import tensorflow as tf

from ppo.agent.actions.action_spaces import make_action_adapter
from ppo.agent.actions.distributions import Distribution
from ppo.agent.networks.build import build_networks
from ppo.agent.networks.perceptrons import IdentityTorso
from ppo.agent.observations import ObservationPreprocessor
from ppo.config.config import Config
from ppo.errors import ConfigError, UnsupportedSpaceError

__all__ = ["Agent"]


class Agent:
    """Policy and value function for an observation space and an action space.

    With `recurrent_size`, the policy and the value function each have a recurrent core,
    whose output is the input of their last layer. The caller stores the state of the
    policy's core, `[N, units]`, and, if it needs values, the state of the value
    function's core.

    Args:
      observation_space: Observation space of one env.
      action_space: Action space of one env.
      config: The settings of the networks and of the action distribution.

    Attributes:
      actions: Adapter between policy outputs, actions and env actions.
      preprocess: Preprocessor that turns raw observations into features.
      cores: Recurrent cores of the policy and of the value function, or empty.
      state_sizes: Number of units of each recurrent state. With `cores`, actions do not
        depend on the second state, which is that of the value function.
      trainable_variables: Keras variables that the optimizer updates; the
        variables of the recurrent cores come last. A subclass may add variables.
      trackables: Objects that a checkpoint must store, by name.

    Raises:
      UnsupportedSpaceError: A space is not supported.
      ConfigError: A custom network cannot be loaded or does not match the spaces.
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
        try:
            self._networks = build_networks(self.preprocess, self.actions, config)
        except tf.errors.ResourceExhaustedError as error:
            raise UnsupportedSpaceError(
                f"network: expected a network that fits into memory, got observations "
                f"with {self.preprocess.size:,} inputs, policy_layers "
                f"{list(config.policy_layers)} and value_layers "
                f"{list(config.value_layers)}; reduce them. Discrete observations are "
                "one-hot encoded."
            ) from error
        self.cores = self._networks.cores
        self.state_sizes = tuple(core.units for core in self.cores)
        parts = self._networks.parts
        self.trainable_variables: list[Any] = [
            variable for part in parts.values() for variable in part.trainable_variables
        ]
        self.trackables = {
            name: tf.train.Checkpoint(**part.trackables)
            for name, part in {**parts, "preprocess": self.preprocess}.items()
        }
        self._compiled_snapshot = tf.function(self._copy_variables, autograph=False)
        for name in ("act", "act_from", "mode"):
            setattr(self, name, self.unconverted(getattr(self, name)))

    @property
    def policy_state_sizes(self) -> tuple[int, ...]:
        """Number of units of each recurrent state that actions depend on."""
        return self.state_sizes[:1] if self.cores else self.state_sizes

    def act(
        self, observation: Any, seed: tf.Tensor, *state: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Sample an action per row of a raw observation.

        Args:
          observation: Raw observation, rows `[N, ...]`.
          seed: int32 pair; the same seed samples the same actions.
          state: States of the recurrent cores, float32 `[N, units]` each; zero at the
            start of an episode.

        Returns:
          Actions, int64 `[N]` for Discrete and otherwise float32 or int64 `[N, A]`;
          log-probabilities `[N]`; and the states after this observation.
        """
        noise = self.actions.noise(_num_rows(observation), seed)
        return self._act_with_log_prob(observation, noise, state)

    def snapshot(self) -> Any:
        """Return copies of all parameters and statistics that `act_from` needs."""
        return self._compiled_snapshot()

    def _copy_variables(self) -> Any:
        values = [tf.identity(variable.value) for variable in self.trainable_variables]
        return values, self.preprocess.scales()

    def act_from(
        self, snapshot: Any, observation: Any, noise: tf.Tensor, *state: tf.Tensor
    ) -> tuple[Any, ...]:
        """Sample actions with the parameters of a snapshot.

        `act` and `mode` call this method, so a subclass may override it to change all
        actions. Log-probabilities are not computed here, because one call to `log_prob`
        for many steps is faster than one call per step.

        Args:
          snapshot: Result of `snapshot`, or None for the current parameters.
          observation: Raw observation, rows `[N, ...]`.
          noise: Result of `actions.noise` for N rows, or zeros to take the most likely
            actions.
          state: States of the recurrent cores; see `act`.

        Returns:
          Actions, as from `act`; the parameters of their distributions, for
          `log_prob`; and the states after this observation.
        """
        replaced, scales = [], None
        if snapshot is not None:
            values, scales = snapshot
            replaced = list(zip(self.trainable_variables, values, strict=True))
        with keras.StatelessScope(replaced):
            features = self.preprocess(observation, scales)
            embeddings = self.embed(features, len(state)) if self.cores else []
            steps = zip(self.cores, embeddings, state, strict=False)
            state = tuple(core.advance(*inputs) for core, *inputs in steps)
            distribution = self.distribution(features, *state[:1])
        return distribution.sample(noise), distribution.parameters, *state

    def in_numpy(
        self, snapshot: Any, num_rows: int
    ) -> Callable[..., tuple[Any, ...]] | None:
        """Return the NumPy form of `act_from` with this snapshot.

        The function takes the leaves of the observation (a list in the order of
        `tf.nest.flatten`), the noise and the states. It returns the env actions,
        followed by the results of `act_from`.

        Args:
          snapshot: Result of `snapshot`.
          num_rows: Largest number of rows.

        Returns:
          The function, or None if a network has no NumPy form. None for a subclass,
          which may have changed the policy, unless it overrides this method.
        """
        networks = self._networks
        is_built_in = isinstance(networks.policy_torso, IdentityTorso)
        if not is_built_in or type(self) is not Agent:
            return None
        values, scales = snapshot
        value_of = dict(zip(map(id, self.trainable_variables), values, strict=True))
        parts = [
            part.in_numpy(lambda variable: value_of[id(variable)].numpy(), num_rows)
            for part in (networks.policy, *self.cores)
        ]
        if None in parts:
            return None
        policy, *cores = parts
        preprocess = self.preprocess.in_numpy(scales, num_rows)
        actions = self.actions

        def act(
            leaves: Sequence[np.ndarray], noise: np.ndarray, *state: np.ndarray
        ) -> tuple[Any, ...]:
            rows, mask = preprocess(leaves)
            if cores:
                # `state` may lack the state of the value function's core, which
                # actions do not need.
                pairs = zip(cores, state, strict=False)
                state = tuple(core(rows, part) for core, part in pairs)
            parameters = policy(state[0] if state else rows)
            action, parameters = actions.sample_in_numpy(parameters, mask, noise)
            return actions.to_env_action_in_numpy(action), action, parameters, *state

        return act

    def log_prob(self, action: tf.Tensor, parameters: Any) -> tf.Tensor:
        """Return log-probabilities `[N]` of actions.

        Args:
          action: Actions from `act_from`, `[N, ...]`.
          parameters: Distribution parameters from `act_from`, `[N, ...]`.
        """
        return self.distribution_from(parameters).log_prob(action)

    def mode(
        self, observation: Any, seed: tf.Tensor, *state: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Return the most likely action per row, like `act` but without sampling."""
        del seed  # accepted only to match the signature of `act`
        # Without noise, a sample is the mode.
        noise = tf.zeros([_num_rows(observation), self.actions.noise_size])
        return self._act_with_log_prob(observation, noise, state)

    def _act_with_log_prob(
        self, observation: Any, noise: tf.Tensor, state: tuple[tf.Tensor, ...]
    ) -> tuple[tf.Tensor, ...]:
        action, parameters, *after = self.act_from(None, observation, noise, *state)
        return action, self.log_prob(action, parameters), *after

    def distribution(
        self, features: Any, core_output: tf.Tensor | None = None
    ) -> Distribution:
        """Return the action distributions for preprocessed rows `[N, ...]`.

        A recurrent policy needs `core_output`, the output of its core, `[N, units]`.
        """
        inputs, mask = self.preprocess.inputs(features)
        if core_output is None:
            core_output = self._torso_output(self._networks.policy_torso, inputs)
        return self._distribution(core_output, mask)

    def distribution_from(self, parameters: Any) -> Distribution:
        """Return the action distribution with the given parameters."""
        return self.actions.distribution_type(*parameters)

    def value(self, features: Any, core_output: tf.Tensor | None = None) -> tf.Tensor:
        """Return the value per preprocessed row, float32 `[N]`.

        A recurrent value function needs `core_output`, the output of its core,
        `[N, units]`.
        """
        if core_output is None:
            inputs, _ = self.preprocess.inputs(features)
            core_output = self._torso_output(self._networks.value_torso, inputs)
        return self._networks.value(core_output)

    def distribution_and_value(self, features: Any) -> tuple[Distribution, tf.Tensor]:
        """Return action distributions and values; a shared torso is evaluated once."""
        methods = type(self).distribution, type(self).value
        if methods != (Agent.distribution, Agent.value):  # of a user's subclass
            return self.distribution(features), self.value(features)
        networks = self._networks
        inputs, mask = self.preprocess.inputs(features)
        torso_output = self._torso_output(networks.policy_torso, inputs)
        distribution = self._distribution(torso_output, mask)
        if not networks.is_torso_shared:
            torso_output = networks.value_torso(inputs)
        return distribution, networks.value(torso_output)

    def embed(self, features: Any, count: int = 2) -> list[tf.Tensor]:
        """Return the inputs of the recurrent cores, `[N, D]` each.

        Args:
          features: Preprocessed rows `[N, ...]`.
          count: Number of cores: 1 for the policy's core only, 2 to include the value
            function's core.
        """
        networks = self._networks
        inputs, _ = self.preprocess.inputs(features)
        torso_output = networks.policy_torso(inputs)
        embeddings = [self.cores[0].embed(torso_output)]
        if count > 1:
            if not networks.is_torso_shared:
                torso_output = networks.value_torso(inputs)
            embeddings.append(self.cores[1].embed(torso_output))
        return embeddings

    def _torso_output(self, torso: Any, inputs: Any) -> Any:
        """Return the output of a torso as the input of networks without cores."""
        if self.cores:
            error = ConfigError(
                "recurrent_size: expected 0, because this algorithm evaluates the "
                f"networks without recurrent states; got {self.state_sizes[0]}."
            )
            # Otherwise, AutoGraph would expand the message to many lines.
            error.ag_pass_through = True  # type: ignore[attr-defined]
            raise error
        return torso(inputs)

    def _distribution(self, torso_output: Any, mask: tf.Tensor | None) -> Distribution:
        return self.actions.distribution(self._networks.policy(torso_output), mask)

    @property
    def custom_model(self) -> Any:
        """The model of a custom network; None if the network is built in."""
        return getattr(self._networks.policy_torso, "model", None)

    @property
    def converts_code(self) -> bool:
        """Whether AutoGraph must convert code that calls the networks.

        A user's model or subclass may branch on tensors. Otherwise, the conversion,
        which takes seconds, changes nothing.
        """
        return self.custom_model is not None or type(self) is not Agent

    @tf.autograph.experimental.do_not_convert
    def unconverted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Exclude a function from AutoGraph, unless `converts_code` is true.

        The function itself must not branch on tensors, or iterate over them. Functions
        that never call a network have the decorator `do_not_convert` instead.
        """
        if self.converts_code:
            return function
        return tf.autograph.experimental.do_not_convert(function)

    @property
    def policy_variables(self) -> list[Any]:
        """Trainable variables of the policy; all of the agent's if some are shared.

        The policy and the value function share variables if they share a torso, or if a
        custom model has no `policy_variables`. Variables that a subclass has added
        belong to the policy, unless the subclass overrides this property.
        """
        parts = self._networks.parts
        policy: set[int] = set()
        if "torso" in parts:
            declared = getattr(parts["torso"], "policy_variables", [])
            if not declared:
                return self.trainable_variables
            policy.update(map(id, declared))
        others = {
            id(variable)
            for name, part in parts.items()
            if not name.startswith("policy")
            for variable in part.trainable_variables
        }
        return [v for v in self.trainable_variables if id(v) not in others - policy]


def _num_rows(observation: Any) -> Any:
    rows = tf.nest.flatten(observation)[0]
    # In exported graphs, the static number of rows is not known.
    return rows.shape[0] or tf.shape(rows)[0]
