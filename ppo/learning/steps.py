"""How an agent without memory looks at a rollout: at each step by itself.

`ppo.learning.sequences` has the same for an agent with memory; `ppo.learning.update`
works with either.
"""

from typing import Any

import tensorflow as tf

from ppo.actions.distributions import Distribution
from ppo.agent import Agent
from ppo.config import Config
from ppo.simulate import Rollout

__all__ = ["Steps"]


class Steps:
    """Looks at the steps of rollouts of a config's size."""

    def __init__(self, agent: Agent, config: Config) -> None:
        self._agent = agent
        self._num_envs = config.num_envs
        self._num_steps = config.steps_per_iteration

    def rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Put rows of a rollout, `[T * B, ...]`, into the order of samples."""
        return rows

    def is_seen(self, rollout: Rollout) -> tf.Tensor:
        """Return where what was observed matters to learning, bool `[T, B]`."""
        return rollout.valid

    def memory(self, rollout: Rollout) -> dict[str, Any]:
        """Return what samples hold besides rows."""
        return {}

    def shuffle(self, samples: Any, count: int, seed: tf.Tensor) -> Any:
        """Deal the steps out to so many minibatches.

        Args:
            samples: leaves `[T * B, ...]`.
            count: number of minibatches; divides T * B.
            seed: int32 pair.

        Returns:
            Leaves `[count, T * B / count, ...]`.
        """
        # Not stateless_shuffle: XLA cannot compile it.
        order = tf.argsort(tf.random.stateless_uniform([self._num_steps], seed))
        return tf.nest.map_structure(
            lambda rows: tf.reshape(
                tf.gather(rows, order), [count, -1, *rows.shape[1:]]
            ),  # [T * B, ...] -> [count, size, ...]
            samples,
        )

    def distribution(self, samples: dict[str, Any]) -> Distribution:
        """Return the action distribution, rows as those of the samples."""
        return self._agent.distribution(samples["features"])

    def distribution_and_value(
        self, samples: dict[str, Any]
    ) -> tuple[Distribution, tf.Tensor]:
        """Return the action distribution and the values, rows as the samples'."""
        return self._agent.distribution_and_value(samples["features"])

    def values(
        self, rollout: Rollout, features: Any, final_features: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Value all observations of a rollout.

        Args:
            rollout: where features are from.
            features: rows `[(T + 1) * B, ...]`.
            final_features: rows `[T * B, ...]`.

        Returns:
            Values `[T + 1, B]`, and of the final observations `[T, B]`.
        """
        shape = [-1, self._num_envs]
        value = tf.reshape(self._agent.value(features), shape)
        return value, tf.reshape(self._agent.value(final_features), shape)
