"""Running statistics for observation normalisation and reward scaling, in float64.

The statistics are updated between iterations, so a rollout and the update that is
computed from it use the same statistics. Invalid rows are ignored.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from ppo.learners import SINGLE_LEARNER, Learners


class RunningMoments:
    """Running mean and variance of rows, in TensorFlow variables.

    Args:
      shape: Shape of a row.

    Attributes:
      trackables: Objects that a checkpoint must store, by name.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._count = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self._mean = tf.Variable(tf.zeros(shape, tf.float64), trainable=False)
        self._squares = tf.Variable(tf.zeros(shape, tf.float64), trainable=False)
        self.trackables = {
            "count": self._count,
            "mean": self._mean,
            "squares": self._squares,
        }
        # Avoid retracing for each new number of rows.
        self._merge = tf.function(
            self._merge_rows, autograph=False, reduce_retracing=True
        )

    @property
    def mean(self) -> tf.Tensor:
        """Mean per element, float64; 0 before the first row."""
        return self._mean.read_value()

    @property
    def variance(self) -> tf.Tensor:
        """Population variance per element, float64; 1 before the first row."""
        variance = self._squares / tf.maximum(self._count, 1.0)
        return tf.where(self._count > 0, variance, tf.ones_like(variance))

    def update(
        self, values: tf.Tensor, mask: tf.Tensor, learners: Learners = SINGLE_LEARNER
    ) -> None:
        """Update the statistics with the rows of `values` where `mask` is true.

        Args:
          values: Rows `[N, ...]` of any numeric dtype.
          mask: Bool `[N]`.
          learners: The group of learners; the rows of all learners are used.
        """
        self._merge(tf.cast(values, tf.float64), mask, learners)

    def _merge_rows(
        self, values: tf.Tensor, mask: tf.Tensor, learners: Learners
    ) -> None:
        """Merge the moments of rows into the running moments (Chan et al. 1979)."""
        mask = tf.reshape(mask, [-1] + [1] * (len(values.shape) - 1))
        zero = tf.zeros_like(values)
        count = tf.reduce_sum(tf.cast(mask, tf.float64))
        total = tf.reduce_sum(tf.where(mask, values, zero), axis=0)
        count, total = learners.sum((count, total))
        mean = total / tf.maximum(count, 1.0)
        deviation = tf.where(mask, values - mean, zero)
        squares = learners.sum(tf.reduce_sum(tf.square(deviation), axis=0))

        shift = mean - self._mean
        share = count / tf.maximum(self._count + count, 1.0)
        between = tf.square(shift) * self._count * share
        self._squares.assign(self._squares + squares + between)
        self._mean.assign(self._mean + shift * share)
        self._count.assign(self._count + count)

    @property
    def scale(self) -> tuple[tf.Tensor, ...]:
        """Mean and reciprocal standard deviation for `normalize`, float64."""
        return self.mean, tf.math.rsqrt(self.variance + 1e-8)

    def normalize(
        self, values: tf.Tensor, clip: float, scale: tuple[tf.Tensor, ...] = ()
    ) -> tf.Tensor:
        """Normalise values to mean 0 and variance 1, and then clip them.

        The subtraction is done in float64, because large values with small differences
        would lose precision in float32.

        Args:
          values: Rows `[N, ...]`.
          clip: Maximum absolute value of the results.
          scale: An earlier value of the property `scale`; the current one by default.

        Returns:
          float32 `[N, ...]`.
        """
        mean, factor = scale or self.scale
        scaled = (tf.cast(values, tf.float64) - mean) * factor
        return tf.cast(tf.clip_by_value(scaled, -clip, clip), tf.float32)

    @staticmethod
    def in_numpy(
        clip: float, scale: tuple[tf.Tensor, ...], num_rows: int
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Return the NumPy form of `normalize`.

        The function maps arrays `[N, ...]` to float64 arrays `[N, ...]`.

        Args:
          clip: See `normalize`.
          scale: See `normalize`.
          num_rows: Maximum N of a call of the function.
        """
        mean, factor = (np.repeat(x.numpy()[None], num_rows, axis=0) for x in scale)
        low, high = np.array(-clip), np.array(clip)  # avoids a conversion per call

        def normalize(values: np.ndarray) -> np.ndarray:
            scaled = np.subtract(values, mean[: len(values)], dtype=np.float64)
            scaled *= factor[: len(values)]
            np.maximum(scaled, low, out=scaled)
            return np.minimum(scaled, high, out=scaled)

        return normalize


class ReturnScale:
    """Scales rewards by the standard deviation of the discounted return.

    The discounted return of each env is accumulated as `R = discount * R + r`, and
    starts at 0 in each episode (Engstrom et al. 2020). No mean is subtracted.

    Attributes:
      trackables: Objects that a checkpoint must store, by name. These do not include
        the returns of current episodes, because a resumed run starts new episodes.
    """

    def __init__(self, num_envs: int, discount: float) -> None:
        self._discount = discount
        # `discount * R` of each env; 0 at the start of an episode.
        self._running_return = np.zeros(num_envs)
        self._moments = RunningMoments(())
        self.trackables = self._moments.trackables

    @property
    def factor(self) -> tf.Tensor:
        """Factor to multiply rewards by, float32 scalar; 1 before the first update."""
        return tf.cast(tf.math.rsqrt(self._moments.variance + 1e-8), tf.float32)

    @np.errstate(over="ignore", invalid="ignore")  # sums of very large rewards
    def update(
        self,
        reward: np.ndarray,
        done: np.ndarray,
        valid: np.ndarray,
        learners: Learners = SINGLE_LEARNER,
    ) -> None:
        """Update the statistics with the rewards of a rollout.

        Args:
          reward: float `[T, B]`.
          done: bool `[T, B]`; whether the episode ended.
          valid: bool `[T, B]`; invalid rows are ignored.
          learners: The group of learners; the returns of all learners are used.
        """
        returns = np.where(valid, reward, 0.0)
        discounts = np.where(done | ~valid, 0.0, self._discount)
        carried = self._running_return
        for total, discount in zip(returns, discounts, strict=True):
            total += carried  # `total` is a view of `returns`
            carried = discount * total
        self._running_return = carried
        returns, valid = tf.reshape(returns, [-1]), tf.reshape(valid, [-1])
        self._moments.update(returns, valid, learners)
