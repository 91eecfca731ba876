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

    Instead of clipping, the objective is a parabola in the ratio. Its maximum is at the
    bound of PPO's clip range, so gradients move ratios outside the range back into it.
    """
    ratio = tf.exp(log_ratio)
    penalty = tf.abs(advantage) / (2.0 * clip_range) * tf.square(ratio - 1.0)
    return -masked_mean(ratio * advantage - penalty, weight)
