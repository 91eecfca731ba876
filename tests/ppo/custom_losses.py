"""Custom policy losses, valid and faulty ones; tests check their line numbers."""

from typing import Any

import tensorflow as tf

from ppo.learning.losses import masked_mean, policy_loss


def raises(log_ratio: Any, **_: Any) -> Any:
    return log_ratio / (1 // 0)  # line 11


def takes_unknown_argument(log_ratio: Any, advantages: Any, **_: Any) -> Any:  # line 14
    return log_ratio


def takes_too_few(log_ratio: Any, weight: Any) -> Any:  # line 18
    return masked_mean(log_ratio, weight)


def per_row(log_ratio: Any, **_: Any) -> Any:  # line 22
    return log_ratio


def python_float(**_: Any) -> Any:  # line 26
    return 3.0


def float64_loss(log_ratio: Any, **_: Any) -> Any:  # line 30
    return tf.reduce_mean(tf.cast(log_ratio, tf.float64))


def is_nan(log_ratio: Any, weight: Any, **_: Any) -> Any:  # line 34
    return masked_mean(tf.sqrt(log_ratio - 1.0), weight)


def has_nan_gradient(log_ratio: Any, weight: Any, **_: Any) -> Any:  # line 38
    return masked_mean(tf.sqrt(log_ratio), weight)


def is_constant(advantage: Any, weight: Any, **_: Any) -> Any:  # line 42
    return masked_mean(advantage, weight)


def branches(log_ratio: Any, **_: Any) -> Any:
    if tf.reduce_sum(log_ratio) > 0.0:  # line 47
        return tf.reduce_sum(log_ratio)
    return tf.zeros([])


def for_categorical(log_ratio: Any, new: Any, weight: Any, **_: Any) -> Any:
    assert new.logits.shape[-1] > 1
    return -masked_mean(log_ratio, weight)


def for_gaussian(log_ratio: Any, new: Any, old: Any, weight: Any, **_: Any) -> Any:
    shift = tf.reduce_sum(tf.square(new.mean - old.mean), axis=-1)
    return masked_mean(shift - log_ratio, weight)


def with_all_arguments(
    log_ratio: Any,
    advantage: Any,
    weight: Any,
    clip_range: Any,
    old: Any,
    new: Any,
    action: Any,
    value: Any,
    target: Any,
    **_: Any,
) -> Any:
    again = new.log_prob(action) - old.log_prob(action)
    rows = (again - log_ratio) * advantage + 0.0 * (value - target) * clip_range
    return masked_mean(rows + old.kl(new) - log_ratio - new.entropy(), weight)


def of_large_value(
    log_ratio: Any, advantage: Any, weight: Any, clip_range: Any, **_: Any
) -> Any:
    return 1000.0 + policy_loss(log_ratio, advantage, weight, clip_range)
