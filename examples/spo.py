"""A custom loss: Simple Policy Optimization (Xie et al. 2024, arXiv 2401.16025).

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
    """Return the loss of a minibatch of N rows; docs/research.md lists the arguments.

    A parabola in the ratio replaces clipping. The maximum of the parabola is where PPO
    clips, so the loss pulls ratios outside the clip range back.
    """
    ratio = tf.exp(log_ratio)
    penalty = tf.abs(advantage) / (2.0 * clip_range) * tf.square(ratio - 1.0)
    return -masked_mean(ratio * advantage - penalty, weight)
