"""Arrange a rollout as samples: single steps, or sequences if the agent is recurrent.

A sequence contains consecutive steps of one env. The recurrent states at its start are
stored in the rollout; the later states are computed with the current parameters.

Rows `[T, B]` are reordered to `[S * L]`, where L is the length of a sequence. An env
has K = T / L sequences, so S = K * B. Sequence k * B + b contains steps k * L to
(k + 1) * L - 1 of env b.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ppo.agent.actions.distributions import Distribution
from ppo.agent.agent import Agent
from ppo.agent.networks.recurrent import is_pending
from ppo.config.config import Config
from ppo.rollout import Rollout


def sum_of_steps(
    step: Callable[[tf.Tensor], tf.Tensor], count: int, size: int
) -> tf.Tensor:
    """Return the sum of `step(index)` for each index below `count`, float32 `[size]`.

    The steps are taken one after the other, in a loop within the graph. AutoGraph would
    take seconds to convert such a loop.
    """
    _, total = tf.while_loop(
        lambda index, _: index < count,
        lambda index, total: (index + 1, total + step(index)),
        (tf.constant(0), tf.zeros([size])),
    )
    return total


class StepSampler:
    """Arranges rollouts as single steps.

    Attributes:
      num_samples: S, the number of steps in a rollout.
    """

    def __init__(self, agent: Agent, config: Config) -> None:
        self._agent = agent
        self._num_envs = config.num_envs
        self.num_samples = config.steps_per_iteration

    def reorder(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows of a rollout, `[T * B, ...]`, in the order of the samples."""
        return rows

    def uses_observation(self, rollout: Rollout) -> tf.Tensor:
        """Return a mask of the observations that learning uses, bool `[T, B]`."""
        return rollout.valid

    def recurrent_inputs(self, rollout: Rollout) -> dict[str, Any]:
        """Return an empty dict; only recurrent networks have additional inputs."""
        return {}

    @tf.autograph.experimental.do_not_convert
    def minibatches(self, samples: Any, count: int, seed: tf.Tensor) -> Any:
        """Shuffle the samples and split them into minibatches.

        Args:
          samples: Nest of tensors `[T * B, ...]`, or `[S, ...]` with one row per
            sequence.
          count: Number of minibatches; must divide S.
          seed: int32 pair.

        Returns:
          Nest of tensors `[count, T * B / count, ...]` or `[count, S / count, ...]`.
        """
        # Shuffle by sorting random numbers, because XLA cannot compile
        # `stateless_shuffle`.
        order = tf.argsort(tf.random.stateless_uniform([self.num_samples], seed))

        def split(rows: tf.Tensor) -> tf.Tensor:
            inner = list(rows.shape[1:])
            rows_by_sample = tf.reshape(rows, [self.num_samples, -1, *inner])
            shuffled = tf.gather(rows_by_sample, order)
            return tf.reshape(shuffled, [count, rows.shape[0] // count, *inner])

        return tf.nest.map_structure(split, samples)

    def distribution(self, samples: dict[str, Any]) -> Distribution:
        """Return the action distribution of each row of the samples."""
        return self._agent.distribution(samples["features"])

    def distribution_and_value(
        self, samples: dict[str, Any]
    ) -> tuple[Distribution, tf.Tensor]:
        """Return the action distribution and the value of each row of the samples."""
        return self._agent.distribution_and_value(samples["features"])

    def values(
        self, rollout: Rollout, features: Any, final_features: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the values of all observations of a rollout.

        Args:
          rollout: Rollout, of which only recurrent states and episode ends are used.
          features: Preprocessed observations, rows `[(T + 1) * B, ...]`.
          final_features: Preprocessed final observations, rows `[T * B, ...]`.

        Returns:
          Values of the observations, `[T + 1, B]`, and of the final observations,
          `[T, B]`.
        """
        shape = [-1, self._num_envs]
        value = tf.reshape(self._agent.value(features), shape)
        return value, tf.reshape(self._agent.value(final_features), shape)


class SequenceSampler(StepSampler):
    """Splits rollouts into sequences, and unrolls the recurrent networks over them.

    Attributes:
      num_samples: S, the number of sequences in a rollout.
      length: L, the number of steps in a sequence.
    """

    def __init__(self, agent: Agent, config: Config) -> None:
        super().__init__(agent, config)
        self.length = config.sequence_length or config.horizon
        self.num_samples //= self.length

    def reorder(self, rows: tf.Tensor) -> tf.Tensor:
        """Return rows of a rollout, `[T * B, ...]`, in the order of the samples."""
        inner = list(rows.shape[1:])
        shape = [-1, self.length, self._num_envs, *inner]
        rows = tf.reshape(rows, shape)  # [T * B, ...] -> [K, L, B, ...]
        return tf.reshape(_swap(rows, 1, 2), [-1, *inner])  # -> [S * L, ...]

    def uses_observation(self, rollout: Rollout) -> tf.Tensor:
        """Return a mask of the observations that learning uses, bool `[T, B]`.

        In addition to valid rows, learning uses invalid rows within an episode, because
        later recurrent states depend on them.
        """
        return rollout.valid | ~(rollout.done | is_pending(rollout.status))

    def recurrent_inputs(self, rollout: Rollout) -> dict[str, Any]:
        """Return the additional inputs of recurrent networks.

        Returns:
          `state`: initial state of each recurrent network, `[S, units]`; `ended` and
          `pending`: bool `[S * L]`; see `RecurrentCore.unroll`.
        """
        pending = is_pending(rollout.status)
        return {
            "state": tuple(
                tf.reshape(state, [self.num_samples, state.shape[-1]])  # [K, B] -> [S]
                for state in rollout.state
            ),
            "ended": self.reorder(tf.reshape(rollout.done, [-1])),
            "pending": self.reorder(tf.reshape(pending, [-1])),
        }

    def distribution(self, samples: dict[str, Any]) -> Distribution:
        """Return the action distribution of each row of the samples."""
        (embedding,) = self._agent.embed(samples["features"], 1)
        core_output = self._rows_of_steps(self._unroll(0, embedding, samples)[0])
        return self._agent.distribution(samples["features"], core_output)

    def distribution_and_value(
        self, samples: dict[str, Any]
    ) -> tuple[Distribution, tf.Tensor]:
        """Return the action distribution and the value of each row of the samples."""
        features = samples["features"]
        policy_output, value_output = (
            self._rows_of_steps(self._unroll(index, embedding, samples)[0])
            for index, embedding in enumerate(self._agent.embed(features))
        )
        return (
            self._agent.distribution(features, policy_output),
            self._agent.value(features, value_output),
        )

    def values(
        self, rollout: Rollout, features: Any, final_features: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the values of all observations of a rollout.

        A final observation belongs to the episode that it ends. Its value is therefore
        computed from the recurrent state before the reset for the next episode.
        """
        agent, core = self._agent, self._agent.cores[1]
        num_rows = self.num_samples * self.length
        _, embedding = agent.embed(features)
        outputs, last_state = self._unroll(
            1, self.reorder(embedding[:num_rows]), self.recurrent_inputs(rollout)
        )
        outputs = self._rollout_rows_of_steps(outputs)
        last_output = core.advance(embedding[num_rows:], last_state[-self._num_envs :])
        value = agent.value(features, tf.concat([outputs, last_output], axis=0))
        _, final_embedding = agent.embed(final_features)
        final_output = core.advance(final_embedding, outputs)
        final_value = agent.value(final_features, final_output)
        shape = [-1, self._num_envs]
        return tf.reshape(value, shape), tf.reshape(final_value, shape)

    def _unroll(
        self, index: int, embedding: tf.Tensor, samples: dict[str, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Unroll the recurrent network `index` (0: policy, 1: value) over M sequences.

        Returns:
          Outputs `[L, M, units]`, and final states `[M, units]`.
        """
        return self._agent.cores[index].unroll(
            self._steps_of_rows(embedding),
            samples["state"][index],
            self._steps_of_rows(samples["ended"]),
            self._steps_of_rows(samples["pending"]),
        )

    def _steps_of_rows(self, rows: tf.Tensor) -> tf.Tensor:
        shape = [-1, self.length, *rows.shape[1:]]
        return _swap(tf.reshape(rows, shape), 0, 1)  # [M * L, ...] -> [L, M, ...]

    def _rows_of_steps(self, steps: tf.Tensor) -> tf.Tensor:
        rows = _swap(steps, 0, 1)  # [L, M, units] -> [M, L, units]
        return tf.reshape(rows, [-1, steps.shape[-1]])

    def _rollout_rows_of_steps(self, steps: tf.Tensor) -> tf.Tensor:
        size = steps.shape[-1]
        steps = tf.reshape(steps, [self.length, -1, self._num_envs, size])
        return tf.reshape(_swap(steps, 0, 1), [-1, size])  # [L, K, B] -> [T * B]


def _swap(tensor: tf.Tensor, first: int, second: int) -> tf.Tensor:
    axes = list(range(len(tensor.shape)))
    axes[first], axes[second] = second, first
    return tf.transpose(tensor, axes)
