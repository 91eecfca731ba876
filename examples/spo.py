"""A loss of one's own: Simple Policy Optimization (Xie et al. 2024, arXiv 2401.16025).

ppo train cartpole --set objective=examples/spo.py:loss
"""

import tensorflow as tf

from ppo.learning.losses import masked_mean


def loss(
    log_ratio: tf.Tensor,
    advantage: tf.Tensor,
    weight: tf.Tensor,
    clip_range: tf.Tensor,
    **_: object,
) -> tf.Tensor:
    """Hold the ratio by a parabola, whose peak is where PPO clips, and beyond too."""
    ratio = tf.exp(log_ratio)
    penalty = tf.abs(advantage) / (2.0 * clip_range) * tf.square(ratio - 1.0)
    return -masked_mean(ratio * advantage - penalty, weight)
