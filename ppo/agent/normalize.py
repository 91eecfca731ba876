"""Running statistics of observations and returns, in float64.

Statistics never change while a rollout is collected and learned from; they are merged
in between, from valid rows only. What a masked row holds has no influence.
"""

import numpy as np
import tensorflow as tf

from ppo.learners import SINGLE_LEARNER, Learners


class RunningMoments:
    """Mean and variance of all rows seen so far, kept in TensorFlow variables.

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
        # One graph call; rows may come in any number without a new trace.
        self._merge = tf.function(self._merge_rows, reduce_retracing=True)

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
        """Take in rows `[N, ...]`, any numeric dtype, where `mask` `[N]` is true."""
        self._merge(tf.cast(values, tf.float64), mask, learners)

    def _merge_rows(
        self, values: tf.Tensor, mask: tf.Tensor, learners: Learners
    ) -> None:
        """Join the moments of rows with those so far (Chan et al. 1979)."""
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
        """What `normalize` subtracts, and what it multiplies by; float64."""
        return self.mean, tf.math.rsqrt(self.variance + 1e-8)

    def normalize(
        self, values: tf.Tensor, clip: float, scale: tuple[tf.Tensor, ...] = ()
    ) -> tf.Tensor:
        """Shift and scale to mean 0 and variance 1, then clip to +-`clip`.

        Returns float32. The subtraction happens in float64: positions far from the
        origin would lose their digits in float32. `scale` is that of now by default.
        """
        mean, factor = scale or self.scale
        scaled = (tf.cast(values, tf.float64) - mean) * factor
        return tf.cast(tf.clip_by_value(scaled, -clip, clip), tf.float32)


class ReturnScale:
    """Divides rewards by the standard deviation of the discounted return.

    The return is summed forward per env, `R = discount * R + r`, and starts at 0 with
    each episode (Engstrom et al. 2020). No mean is subtracted.

    Attributes:
        trackables: Objects that a checkpoint must store, by name. The running returns
            are not among them, because a restored run begins new episodes.
    """

    def __init__(self, num_envs: int, discount: float) -> None:
        self._discount = discount
        self._running_return = np.zeros(
            num_envs
        )  # discounted, and 0 after an episode's end
        self._moments = RunningMoments(())
        self.trackables = self._moments.trackables

    @property
    def factor(self) -> tf.Tensor:
        """What to multiply rewards by, float32; 1 before the first row."""
        return tf.cast(tf.math.rsqrt(self._moments.variance + 1e-8), tf.float32)

    def update(
        self,
        reward: np.ndarray,
        done: np.ndarray,
        valid: np.ndarray,
        learners: Learners = SINGLE_LEARNER,
    ) -> None:
        """Take in a rollout: float `[T, B]`, bool `[T, B]`, bool `[T, B]`."""
        returns = np.where(valid, reward, 0.0)
        kept = np.where(done | ~valid, 0.0, self._discount)
        carried = self._running_return
        for total, share in zip(returns, kept, strict=True):
            total += carried
            carried = share * total
        self._running_return = carried
        returns, valid = tf.reshape(returns, [-1]), tf.reshape(valid, [-1])
        self._moments.update(returns, valid, learners)
