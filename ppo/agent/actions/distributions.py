"""Action distributions: Gaussians, categorical, several choices at once, Bernoulli.

Each is a value made of tensors, `[N, ...]`, that can sample, tell its mode, and give
log-probability, entropy and Kullback-Leibler divergence per row, in float32. A choice
that is not allowed has a logit so low that its probability is 0 in float32. It stays
finite, so that neither entropy nor any gradient becomes NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import tensorflow as tf

_FORBIDDEN = -1e9
_LOG_TWO_PI = math.log(2.0 * math.pi)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(16)  # of exp(-x^2 / 2)


class Distribution(Protocol):
    """What a policy head hands to the rollout and to the losses."""

    @staticmethod
    def noise(num_rows: int, size: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw what `sample` needs, `[num_rows, size]`; `seed` is an int32 pair."""

    @property
    def parameters(self) -> tuple[tf.Tensor, ...]:
        """What the type makes the same distribution from, `[N, ...]` each."""

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn a row of noise into an action, for each row."""

    def mode(self) -> tf.Tensor:
        """Return the most likely action per row."""

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-density of one action per row, `[N]`."""

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""

    def kl(self, other: Self) -> tf.Tensor:
        """Return the divergence KL(self || other) in nats per row, `[N]`."""


@dataclass(frozen=True)
class DiagonalGaussian:
    """Independent normal distributions over the last axis.

    Attributes:
        mean: float32 `[N, A]`.
        log_std: float32, `[A]` (shared by all rows) or `[N, A]`.
    """

    mean: tf.Tensor
    log_std: tf.Tensor

    @staticmethod
    def noise(num_rows: int, size: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw standard normal numbers `[num_rows, size]`; `seed` is an int32 pair."""
        return tf.random.stateless_normal([num_rows, size], seed)

    @property
    def parameters(self) -> tuple[tf.Tensor, ...]:
        """Mean and log standard deviation, `[N, A]` each."""
        return self.mean, self.log_std + tf.zeros_like(self.mean)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn a row of noise into an action, for each row: float32 `[N, A]`."""
        return self.mean + tf.exp(self.log_std) * noise

    def mode(self) -> tf.Tensor:
        """Return the mean, `[N, A]`."""
        return self.mean

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-density of `action` `[N, A]` per row, `[N]`."""
        deviation = (action - self.mean) * tf.exp(-self.log_std)
        per_dimension = -0.5 * (tf.square(deviation) + _LOG_TWO_PI) - self.log_std
        return tf.reduce_sum(per_dimension, axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""
        per_dimension = self.log_std + 0.5 * (1.0 + _LOG_TWO_PI)
        return tf.reduce_sum(per_dimension + tf.zeros_like(self.mean), axis=-1)

    def kl(self, other: Self) -> tf.Tensor:
        """Return KL(self || other) in nats per row, `[N]`."""
        log_ratio = self.log_std - other.log_std
        shift = (self.mean - other.mean) * tf.exp(-other.log_std)
        squares = tf.exp(2.0 * log_ratio) + tf.square(shift)
        return tf.reduce_sum(0.5 * (squares - 1.0) - log_ratio, axis=-1)


@dataclass(frozen=True)
class SquashedGaussian(DiagonalGaussian):
    """What tanh makes of independent normal numbers, over the last axis.

    Actions are these numbers before tanh, since float32 has no room for what is near
    -1 and 1 after it. Densities are those after it, and divergences the same anyway.
    """

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-density of tanh of `action` `[N, A]` per row, `[N]`."""
        return super().log_prob(action) - tf.reduce_sum(_log_slope(action), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`.

        That is what it is before tanh, and the mean log slope of tanh, by Gauss-Hermite
        quadrature: within 0.005 per dimension for deviations up to 2, without noise.
        """
        spread = tf.exp(self.log_std)[..., None] * _NODES.astype(np.float32)
        slopes = _log_slope(self.mean[..., None] + spread)  # [N, A, nodes]
        weights = (_WEIGHTS / _WEIGHTS.sum()).astype(np.float32)
        return super().entropy() + tf.reduce_sum(weights * slopes, axis=[-2, -1])


def _log_slope(number: tf.Tensor) -> tf.Tensor:
    """Return log(1 - tanh(x)^2), which is finite for any finite x."""
    return 2.0 * (math.log(2.0) - number - tf.math.softplus(-2.0 * number))


@dataclass(frozen=True)
class Categorical:
    """A choice of one of K actions, numbered from 0.

    Attributes:
        logits: float32 `[..., K]`, unnormalised log-probabilities; `[N, K]` below.
    """

    logits: tf.Tensor

    @property
    def log_probs(self) -> tf.Tensor:
        """Normalised log-probabilities, `[N, K]`."""
        return tf.nn.log_softmax(self.logits, axis=-1)

    @staticmethod
    def noise(num_rows: int, size: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw Gumbel noise `[num_rows, size]`; `seed` is an int32 pair."""
        uniform = tf.random.stateless_uniform(
            [num_rows, size], seed, minval=1e-20, maxval=1.0
        )
        return -tf.math.log(-tf.math.log(uniform))

    @property
    def parameters(self) -> tuple[tf.Tensor, ...]:
        """The logits, `[N, K]`."""
        return (self.logits,)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn a row of noise into an action, for each row: int64 `[N]`.

        Adding Gumbel noise to the logits makes their argmax a sample.
        """
        return tf.argmax(self.logits + noise, axis=-1, output_type=tf.int64)

    def mode(self) -> tf.Tensor:
        """Return the most likely action, int64 `[N]`."""
        return tf.argmax(self.logits, axis=-1, output_type=tf.int64)

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-probability of `action` (integer `[N]`) per row, `[N]`."""
        # A product with a one-hot row: the gradient of a gather is a slow scatter.
        chosen = tf.one_hot(action, self.logits.shape[-1], dtype=self.logits.dtype)
        return tf.reduce_sum(chosen * self.log_probs, axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""
        log_probs = self.log_probs
        return -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: Self) -> tf.Tensor:
        """Return KL(self || other) in nats per row, `[N]`."""
        log_probs = self.log_probs
        difference = log_probs - other.log_probs
        return tf.reduce_sum(tf.exp(log_probs) * difference, axis=-1)


@dataclass(frozen=True)
class MultiCategorical(Categorical):
    """D independent choices, choice d among `sizes[d]` options numbered from 0.

    Attributes:
        logits: float32 `[N, D, max(sizes)]`; what lies beyond a size is masked.
    """

    @classmethod
    def from_logits(
        cls, logits: tf.Tensor, sizes: Sequence[int], allowed: Any = None
    ) -> Self:
        """Make it of logits `[N, sum(sizes)]`, and of bool flags if some are forbidden.

        The sizes are the numbers of options of each choice.
        """
        rows = padded_choices(logits, sizes)
        if allowed is not None:
            rows = masked_logits(rows, padded_choices(allowed, sizes))
        if min(sizes) < max(sizes):
            exists = np.arange(max(sizes)) < np.asarray(sizes)[:, None]
            rows = tf.where(exists, rows, _FORBIDDEN)
        return cls(rows)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn noise, `[N, D * max(sizes)]`, into actions, int64 `[N, D]`."""
        return super().sample(tf.reshape(noise, [-1, *self.logits.shape[1:]]))

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-probability of `action` (integer `[N, D]`) per row, `[N]`."""
        return tf.reduce_sum(super().log_prob(action), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""
        return tf.reduce_sum(super().entropy(), axis=-1)

    def kl(self, other: Self) -> tf.Tensor:
        """Return KL(self || other) in nats per row, `[N]`."""
        return tf.reduce_sum(super().kl(other), axis=-1)


@dataclass(frozen=True)
class Bernoulli:
    """Independent bits over the last axis.

    Attributes:
        logits: float32 `[N, A]`, log of the odds that a bit is 1.
    """

    logits: tf.Tensor

    @staticmethod
    def noise(num_rows: int, size: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw logistic noise `[num_rows, size]`; `seed` is an int32 pair."""
        uniform = tf.random.stateless_uniform(
            [num_rows, size], seed, minval=1e-20, maxval=1.0
        )
        return tf.math.log(uniform) - tf.math.log1p(-uniform)

    @property
    def parameters(self) -> tuple[tf.Tensor, ...]:
        """The logits, `[N, A]`."""
        return (self.logits,)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn a row of noise into an action, for each row: 0 or 1, int64 `[N, A]`.

        Logistic noise exceeds -x with probability sigmoid(x).
        """
        return tf.cast(self.logits + noise > 0, tf.int64)

    def mode(self) -> tf.Tensor:
        """Return the more likely value of each bit, int64 `[N, A]`."""
        return tf.cast(self.logits > 0, tf.int64)

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-probability of `action` (0 or 1, `[N, A]`) per row, `[N]`."""
        signs = 2.0 * tf.cast(action, tf.float32) - 1.0
        return -tf.reduce_sum(tf.math.softplus(-signs * self.logits), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""
        # log(1 + e^x) - x * sigmoid(x), which is even in x.
        surprise = tf.math.softplus(self.logits)
        mean = self.logits * tf.math.sigmoid(self.logits)
        return tf.reduce_sum(surprise - mean, axis=-1)

    def kl(self, other: Self) -> tf.Tensor:
        """Return KL(self || other) in nats per row, `[N]`."""
        probability = tf.math.sigmoid(self.logits)
        log_one = tf.math.softplus(-other.logits) - tf.math.softplus(-self.logits)
        log_zero = tf.math.softplus(other.logits) - tf.math.softplus(self.logits)
        per_bit = probability * log_one + (1.0 - probability) * log_zero
        return tf.reduce_sum(per_bit, axis=-1)


def masked_logits(logits: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
    """Take all probability from actions that are not allowed: logits `[..., K]`.

    Where nothing is allowed, all is: an ended episode or a padding row has to choose
    something, and whatever it is does not count.
    """
    allowed |= ~tf.reduce_any(allowed, axis=-1, keepdims=True)
    return tf.where(allowed, logits, _FORBIDDEN)


def padded_choices(joined: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Give each of D choices a row of its own, filled up with 0 or False.

    Turns `[N, sum(sizes)]`, the choices one after the other, to `[N, D, max(sizes)]`.
    """
    longest = max(sizes)
    if min(sizes) == longest:
        return tf.reshape(joined, [-1, len(sizes), longest])
    # Not a gather, whose gradient is a slow scatter.
    parts = [
        tf.pad(part, [[0, 0], [0, longest - size]])
        for part, size in zip(tf.split(joined, sizes, axis=1), sizes, strict=True)
    ]
    return tf.stack(parts, axis=1)
