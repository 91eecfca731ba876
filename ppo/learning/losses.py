"""The PPO objective and its diagnostics, as functions of tensors.

All inputs are float32 `[N]`. `weight` is 1 for a row that counts and 0 for one that
does not; every mean divides by the number of rows that count. Rows of weight 0 must
hold finite numbers, which then change nothing.
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
_Mean = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def masked_mean(values: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the mean over rows of weight 1; 0 if there is none."""
    return tf.reduce_sum(values * weight) / tf.maximum(tf.reduce_sum(weight), 1.0)


def normalized_advantages(
    advantage: tf.Tensor, weight: tf.Tensor, mean: _Mean = masked_mean
) -> tf.Tensor:
    """Shift and scale advantages to mean 0 and standard deviation 1."""
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
        advantage: advantages, usually normalised.
        weight: 1 or 0 per row.
        clip_range: epsilon; the ratio earns nothing outside [1 - eps, 1 + eps]. None
            for the objective without clipping.

    Returns:
        A scalar to be minimised. With clipping, no row counts with more than 3 times
        its advantage (dual clip, Ye et al. 2020).
    """
    ratio = tf.exp(tf.minimum(log_ratio, 20.0))  # e**20 is as good as infinity
    if clip_range is None:
        return -masked_mean(ratio * advantage, weight)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    objective = tf.minimum(ratio * advantage, clipped * advantage)
    # Of a bad action that has become likely, one row would be the whole minibatch.
    objective = tf.maximum(objective, -_DUAL_CLIP * tf.abs(advantage))
    return -masked_mean(objective, weight)


def kl_penalty_loss(
    kl: tf.Tensor, penalty: float, *, cutoff: float, cutoff_coefficient: float
) -> tf.Tensor:
    """Return what a divergence costs: a share of it, and much more beyond a cutoff.

    That is `penalty * kl + cutoff_coefficient * max(kl - cutoff, 0)**2` (Hafner et al.
    2017): the square keeps a policy from leaping before the penalty has adapted.
    `kl` is the mean KL(old || new), a scalar; it and the cutoff are in nats.
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
    """Return half the mean squared error.

    With `clip_range`, a row counts with the greater of two errors: that of its value,
    and that of its value moved to within `clip_range` of `old_value`. So it earns
    nothing to move further than that in one iteration (as in OpenAI's baselines).
    """
    error = tf.square(value - target)
    if clip_range is not None:
        change = tf.clip_by_value(value - old_value, -clip_range, clip_range)
        error = tf.maximum(error, tf.square(old_value + change - target))
    return 0.5 * masked_mean(error, weight)


def approximate_kl(log_ratio: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Estimate KL(old || new) in nats by `(r - 1) - log r` (Schulman 2020, k3)."""
    return masked_mean(tf.exp(log_ratio) - 1.0 - log_ratio, weight)


def clip_fraction(
    log_ratio: tf.Tensor, weight: tf.Tensor, clip_range: float
) -> tf.Tensor:
    """Return the share of rows whose ratio is outside the clip range."""
    outside = tf.abs(tf.exp(log_ratio) - 1.0) > clip_range
    return masked_mean(tf.cast(outside, tf.float32), weight)


def explained_variance(
    value: tf.Tensor, target: tf.Tensor, weight: tf.Tensor, mean: _Mean = masked_mean
) -> tf.Tensor:
    """Return 1 - Var(target - value) / Var(target): 1 is perfect, 0 is a constant."""
    error = target - value
    error_variance = mean(tf.square(error - mean(error, weight)), weight)
    centred = target - mean(target, weight)
    return 1.0 - error_variance / (mean(tf.square(centred), weight) + 1e-8)
