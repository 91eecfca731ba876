"""The PPO objective and its diagnostics, as functions of tensors.

All inputs are float32 `[N]`. `weight` is 1 for valid rows and 0 for rows to ignore;
every mean is over the valid rows. The values of ignored rows must be finite, but do not
affect the result.
"""

from collections.abc import Callable

import tensorflow as tf

__all__ = [
    "approximate_kl",
    "clip_fraction",
    "explained_variance",
    "kl_penalty_loss",
    "masked_mean",
    "normalized_advantages",
    "policy_loss",
    "value_loss",
]

_DUAL_CLIP = 3.0
#: A function of values and weights, such as `masked_mean`, or a mean over all learners.
_Mean = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def masked_mean(values: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the mean over rows of weight 1, or 0 if there are none."""
    return tf.reduce_sum(values * weight) / tf.maximum(tf.reduce_sum(weight), 1.0)


def normalized_advantages(
    advantage: tf.Tensor, weight: tf.Tensor, mean: _Mean = masked_mean
) -> tf.Tensor:
    """Return advantages shifted and scaled to mean 0 and standard deviation 1."""
    centred = advantage - mean(advantage, weight)
    variance = mean(tf.square(centred), weight)
    return centred / (tf.sqrt(variance) + 1e-8)


def policy_loss(
    log_ratio: tf.Tensor,
    advantage: tf.Tensor,
    weight: tf.Tensor,
    clip_range: float | None,
    **_: object,
) -> tf.Tensor:
    """Return the negated surrogate objective (Schulman et al. 2017, equations 6, 7).

    Args:
      log_ratio: log pi_new(a|o) - log pi_old(a|o).
      advantage: Advantages, usually normalised.
      weight: 1 or 0 per row.
      clip_range: Epsilon; moving the ratio outside [1 - epsilon, 1 + epsilon] does
        not improve the objective. None disables clipping.

    Returns:
      A scalar to minimise. With clipping, a row contributes at most 3 times the
      absolute value of its advantage (dual clip, Ye et al. 2020).
    """
    ratio = tf.exp(tf.minimum(log_ratio, 20.0))  # prevents overflow
    if clip_range is None:
        return -masked_mean(ratio * advantage, weight)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    objective = tf.minimum(ratio * advantage, clipped * advantage)
    # Without this bound, a bad action that has become likely could dominate the mean.
    objective = tf.maximum(objective, -_DUAL_CLIP * tf.abs(advantage))
    return -masked_mean(objective, weight)


def kl_penalty_loss(
    kl: tf.Tensor, penalty: float, *, cutoff: float, cutoff_coefficient: float
) -> tf.Tensor:
    """Return the KL penalty: linear, plus a quadratic term above a cutoff.

    The loss is `penalty * kl + cutoff_coefficient * max(kl - cutoff, 0)**2` (Hafner et
    al. 2017). The quadratic term prevents large policy changes while the penalty
    coefficient is still too small. `kl` is the mean KL(old || new), a scalar; `kl` and
    `cutoff` are in nats.
    """
    excess = tf.maximum(kl - cutoff, 0.0)
    return penalty * kl + cutoff_coefficient * tf.square(excess)


def value_loss(
    value: tf.Tensor,
    target: tf.Tensor,
    weight: tf.Tensor,
    *,
    old_value: tf.Tensor | None = None,
    clip_range: float | None = None,
) -> tf.Tensor:
    """Return half the mean squared error of values.

    With `clip_range`, the error of a row is the larger of two: the error of `value`,
    and the error of `value` clipped to within `clip_range` of `old_value`. A larger
    change in one iteration therefore does not reduce the loss (as in OpenAI Baselines).
    """
    error = tf.square(value - target)
    if clip_range is not None:
        change = tf.clip_by_value(value - old_value, -clip_range, clip_range)
        error = tf.maximum(error, tf.square(old_value + change - target))
    return 0.5 * masked_mean(error, weight)


def approximate_kl(log_ratio: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Estimate KL(old || new) in nats as the mean of `(ratio - 1) - log_ratio`.

    This is the estimator k3 of Schulman 2020.
    """
    return masked_mean(tf.exp(log_ratio) - 1.0 - log_ratio, weight)


def clip_fraction(
    log_ratio: tf.Tensor, weight: tf.Tensor, clip_range: float
) -> tf.Tensor:
    """Return the fraction of rows whose ratio is outside the clip range."""
    outside = tf.abs(tf.exp(log_ratio) - 1.0) > clip_range
    return masked_mean(tf.cast(outside, tf.float32), weight)


@tf.autograph.experimental.do_not_convert
def explained_variance(
    value: tf.Tensor, target: tf.Tensor, weight: tf.Tensor, mean: _Mean = masked_mean
) -> tf.Tensor:
    """Return 1 - Var(target - value) / Var(target), a scalar.

    The result is 1 for a perfect prediction, and 0 for a constant one.
    """
    error = target - value
    error_variance = mean(tf.square(error - mean(error, weight)), weight)
    centred = target - mean(target, weight)
    return 1.0 - error_variance / (mean(tf.square(centred), weight) + 1e-8)
