"""How an agent looks at a rollout: step by step or, with a memory, as sequences.

A sequence is of one env. It starts from the states that acting had there, which the
rollout has stored; within it, the agent's present parameters unroll. Rows `[T, B]` lie
sequence by sequence, `[S * L]`: sequence k * B + b holds the steps k * L to (k + 1) * L
of env b.
"""

from typing import Any

import tensorflow as tf

from ppo.agent.actions.distributions import Distribution
from ppo.agent.agent import Agent
from ppo.agent.networks.recurrent import is_pending
from ppo.config.config import Config
from ppo.rollout import Rollout


class Steps:
    """Looks at rollouts of a config's size step by step.

    Attributes:
        count: S, how many pieces of a rollout are dealt out to minibatches: its steps.
    """

    def __init__(self, agent: Agent, config: Config) -> None:
        self._agent = agent
        self._num_envs = config.num_envs
        self.count = config.steps_per_iteration

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
        """Deal the steps, or whole sequences, out to so many minibatches.

        Args:
            samples: leaves `[T * B, ...]`, or `[S, ...]` with one row per sequence.
            count: number of minibatches; divides S.
            seed: int32 pair.

        Returns:
            Leaves `[count, T * B / count, ...]` or `[count, S / count, ...]`.
        """
        # Not stateless_shuffle: XLA cannot compile it.
        order = tf.argsort(tf.random.stateless_uniform([self.count], seed))

        def dealt(rows: tf.Tensor) -> tf.Tensor:
            inner = list(rows.shape[1:])
            pieces = tf.reshape(rows, [self.count, -1, *inner])
            pieces = tf.gather(pieces, order)
            return tf.reshape(pieces, [count, rows.shape[0] // count, *inner])

        return tf.nest.map_structure(dealt, samples)

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
            rollout: for its states and ends.
            features: rows `[(T + 1) * B, ...]`.
            final_features: rows `[T * B, ...]`.

        Returns:
            Values `[T + 1, B]`, and of the final observations `[T, B]`.
        """
        shape = [-1, self._num_envs]
        value = tf.reshape(self._agent.value(features), shape)
        return value, tf.reshape(self._agent.value(final_features), shape)


class Sequences(Steps):
    """Cuts rollouts into sequences, and remembers through them.

    Attributes:
        count: S, sequences of a rollout.
        length: L, steps of a sequence.
    """

    def __init__(self, agent: Agent, config: Config) -> None:
        super().__init__(agent, config)
        self.length = config.sequence_length or config.horizon
        self.count //= self.length

    def rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Put rows of a rollout, `[T * B, ...]`, into the order of samples."""
        inner = list(rows.shape[1:])
        shape = [-1, self.length, self._num_envs, *inner]
        rows = tf.reshape(rows, shape)  # [T * B, ...] -> [K, L, B, ...]
        return tf.reshape(_swap(rows, 1, 2), [-1, *inner])  # -> [S * L, ...]

    def is_seen(self, rollout: Rollout) -> tf.Tensor:
        """Return where what was observed matters to learning, bool `[T, B]`.

        In valid rows, and where an episode goes on although its row is not to be
        learned from: it is remembered.
        """
        return rollout.valid | ~(rollout.done | is_pending(rollout.status))

    def memory(self, rollout: Rollout) -> dict[str, Any]:
        """Return what samples hold besides rows.

        Returns:
            `state` before the sequences, of each memory, `[S, units]`; `ended` and
            `pending`, bool `[S * L]`.
        """
        pending = is_pending(rollout.status)
        return {
            "state": tuple(
                tf.reshape(state, [self.count, state.shape[-1]])  # [K, B] -> [S]
                for state in rollout.state
            ),
            "ended": self.rows(tf.reshape(rollout.done, [-1])),
            "pending": self.rows(tf.reshape(pending, [-1])),
        }

    def distribution(self, samples: dict[str, Any]) -> Distribution:
        """Return the action distribution, rows as those of the samples."""
        (embedding,) = self._agent.embed(samples["features"], 1)
        remembered = self._rows_of_steps(self._unroll(0, embedding, samples)[0])
        return self._agent.distribution(samples["features"], remembered)

    def distribution_and_value(
        self, samples: dict[str, Any]
    ) -> tuple[Distribution, tf.Tensor]:
        """Return the action distribution and the values, rows as the samples'."""
        features = samples["features"]
        for_policy, for_value = (
            self._rows_of_steps(self._unroll(index, embedding, samples)[0])
            for index, embedding in enumerate(self._agent.embed(features))
        )
        return (
            self._agent.distribution(features, for_policy),
            self._agent.value(features, for_value),
        )

    def values(
        self, rollout: Rollout, features: Any, final_features: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Value all observations of a rollout.

        A final observation is the last one of its episode: it is judged with the state
        after the step before it, and the state is zero only then.
        """
        agent, memory = self._agent, self._agent.cores[1]
        num_rows = self.count * self.length
        _, embedding = agent.embed(features)
        outputs, last_state = self._unroll(
            1, self.rows(embedding[:num_rows]), self.memory(rollout)
        )
        outputs = self._steps_of_rollout(outputs)
        newest = memory.advance(embedding[num_rows:], last_state[-self._num_envs :])
        value = agent.value(features, tf.concat([outputs, newest], axis=0))
        _, final_embedding = agent.embed(final_features)
        final = memory.advance(final_embedding, outputs)
        final_value = agent.value(final_features, final)
        shape = [-1, self._num_envs]
        return tf.reshape(value, shape), tf.reshape(final_value, shape)

    def _unroll(
        self, index: int, embedding: tf.Tensor, samples: dict[str, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Let a memory run through M sequences: `[L, M, units]` and `[M, units]`."""
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

    def _steps_of_rollout(self, steps: tf.Tensor) -> tf.Tensor:
        size = steps.shape[-1]
        steps = tf.reshape(steps, [self.length, -1, self._num_envs, size])
        return tf.reshape(_swap(steps, 0, 1), [-1, size])  # [L, K, B] -> [T * B]


def _swap(tensor: tf.Tensor, first: int, second: int) -> tf.Tensor:
    axes = list(range(len(tensor.shape)))
    axes[first], axes[second] = second, first
    return tf.transpose(tensor, axes)
