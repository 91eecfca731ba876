"""The PPO objective and its diagnostics, as functions of tensors.

All inputs are float32 `[N]`. `weight` is 1 for a row that counts and 0 for one that
does not; every mean divides by the number of rows that count. Rows of weight 0 must
hold finite numbers, which then change nothing.
"""

import tensorflow as tf

__all__ = [
    "approximate_kl",
    "clip_fraction",
    "explained_variance",
    "masked_mean",
    "normalized_advantages",
    "policy_loss",
    "value_loss",
]


def masked_mean(values: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the mean over rows of weight 1; 0 if there is none."""
    return tf.reduce_sum(values * weight) / tf.maximum(tf.reduce_sum(weight), 1.0)


def normalized_advantages(advantage: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Shift and scale advantages to mean 0 and standard deviation 1."""
    centred = advantage - masked_mean(advantage, weight)
    variance = masked_mean(tf.square(centred), weight)
    return centred / (tf.sqrt(variance) + 1e-8)


def policy_loss(
    log_ratio: tf.Tensor, advantage: tf.Tensor, weight: tf.Tensor, clip_range: float
) -> tf.Tensor:
    """Return the negated clipped objective (Schulman et al. 2017, equation 7).

    Args:
        log_ratio: log pi_new(a|o) - log pi_old(a|o).
        advantage: advantages, usually normalised.
        weight: 1 or 0 per row.
        clip_range: epsilon; the ratio earns nothing outside [1 - eps, 1 + eps].

    Returns:
        A scalar to be minimised.
    """
    # Far beyond the clip range, e**20 is as good as infinity, and has a gradient.
    ratio = tf.exp(tf.minimum(log_ratio, 20.0))
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    objective = tf.minimum(ratio * advantage, clipped * advantage)
    return -masked_mean(objective, weight)


def value_loss(value: tf.Tensor, target: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return half the mean squared error, without clipping."""
    return 0.5 * masked_mean(tf.square(value - target), weight)


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
    value: tf.Tensor, target: tf.Tensor, weight: tf.Tensor
) -> tf.Tensor:
    """Return 1 - Var(target - value) / Var(target): 1 is perfect, 0 is a constant."""
    error = target - value
    error_variance = masked_mean(tf.square(error - masked_mean(error, weight)), weight)
    centred = target - masked_mean(target, weight)
    return 1.0 - error_variance / (masked_mean(tf.square(centred), weight) + 1e-8)
