"""Several choices at once, and choices of which some are not allowed.

An action that is not allowed has a logit so low that its probability is 0 in float32.
It stays finite, so that neither the probability times its logarithm nor any gradient
becomes NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorflow as tf

from ppo.actions.distributions import Categorical

__all__ = ["MultiCategorical", "masked_logits", "padded_choices"]

_FORBIDDEN = -1e9


def masked_logits(logits: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
    """Take all probability from actions that are not allowed.

    Args:
        logits: float32 `[..., K]`.
        allowed: bool `[..., K]`. Where nothing is, all is: an ended episode or a
            padding row has to choose something, and whatever it is does not count.

    Returns:
        float32 `[..., K]`.
    """
    allowed |= ~tf.reduce_any(allowed, axis=-1, keepdims=True)
    return tf.where(allowed, logits, _FORBIDDEN)


def padded_choices(joined: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Give each of D choices a row of its own, filled up to the same length.

    Args:
        joined: `[N, sum(sizes)]`, the choices one after the other, any dtype.
        sizes: number of options of each choice.

    Returns:
        `[N, D, max(sizes)]`; what is filled in is 0 or False.
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


@dataclass(frozen=True)
class MultiCategorical:
    """D independent choices, choice d among `sizes[d]` options numbered from 0.

    Attributes:
        logits: float32 `[N, D, max(sizes)]`; what lies beyond a size is masked.
    """

    logits: tf.Tensor

    @property
    def choices(self) -> Categorical:
        """Every choice of every row, `[N, D]`."""
        return Categorical(self.logits)

    @classmethod
    def of(
        cls, logits: tf.Tensor, sizes: Sequence[int], allowed: Any = None
    ) -> "MultiCategorical":
        """Make it of logits, and flags if some options are not allowed.

        Args:
            logits: float32 `[N, sum(sizes)]`.
            sizes: number of options of each choice.
            allowed: bool `[N, sum(sizes)]` or None.
        """
        rows = padded_choices(logits, sizes)
        if allowed is not None:
            rows = masked_logits(rows, padded_choices(allowed, sizes))
        if min(sizes) < max(sizes):
            exists = np.arange(max(sizes)) < np.asarray(sizes)[:, None]
            rows = tf.where(exists, rows, _FORBIDDEN)
        return cls(rows)

    @staticmethod
    def draw_noise(num_rows: int, size: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw Gumbel noise; `size` is D * max(sizes), `seed` an int32 pair."""
        return Categorical.draw_noise(num_rows, size, seed)

    @property
    def parameters(self) -> tuple[tf.Tensor, ...]:
        """The logits, `[N, D, max(sizes)]`."""
        return (self.logits,)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Turn a row of noise into an action, for each row: int64 `[N, D]`."""
        shape = [-1, *self.logits.shape[1:]]
        return self.choices.sample(tf.reshape(noise, shape))

    def mode(self) -> tf.Tensor:
        """Return the most likely option of each choice, int64 `[N, D]`."""
        return self.choices.mode()

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Return the log-probability of `action` (integer `[N, D]`) per row, `[N]`."""
        return tf.reduce_sum(self.choices.log_prob(action), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Return the entropy in nats per row, `[N]`."""
        return tf.reduce_sum(self.choices.entropy(), axis=-1)

    def kl(self, other: Self) -> tf.Tensor:
        """Return KL(self || other) in nats per row, `[N]`."""
        return tf.reduce_sum(self.choices.kl(other.choices), axis=-1)
