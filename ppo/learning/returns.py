"""Advantages and value targets over whole rollouts `[T, B]`.

An advantage is a sum over the step itself and later steps. The sum ends at three kinds
of steps:

* A `terminated` step does not bootstrap.
* A `truncated` step bootstraps from the value of its final observation.
* A step that is not `valid` has advantage and target 0. The step before it bootstraps
  from the value of its observation.
"""

import tensorflow as tf


def next_values(value: tf.Tensor, final_value: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
    """Return the value `[T, B]` of the observation that each step returned.

    The step that ends an episode also resets the env, so the next row belongs to a new
    episode. The value of the final observation is used instead.

    Args:
      value: float32 `[T + 1, B]`, values of the observations before each step and
        after the last step.
      final_value: float32 `[T, B]`, values of the final observations.
      done: bool `[T, B]`, terminated or truncated.
    """
    return tf.where(done, final_value, value[1:])


def advantages_and_targets(
    *,
    reward: tf.Tensor,
    value: tf.Tensor,
    next_value: tf.Tensor,
    terminated: tf.Tensor,
    truncated: tf.Tensor,
    valid: tf.Tensor,
    discount: float,
    gae_lambda: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return generalised advantage estimates, and value targets.

    The estimates are those of Schulman et al. 2016, equation 16. With
    `delta_t = r_t + discount * V(next_t) * (1 - terminated_t) - V(o_t)`,

        A_t = delta_t + discount * lambda * (1 - done_t) * A_{t+1},

    and `A_t = 0` if step t is not valid.

    Args:
      reward: float32 `[T, B]`.
      value: float32 `[T, B]`, V(o_t).
      next_value: float32 `[T, B]`, from `next_values`.
      terminated: bool `[T, B]`.
      truncated: bool `[T, B]`.
      valid: bool `[T, B]`.
      discount: Gamma, in [0, 1].
      gae_lambda: Lambda, in [0, 1].

    Returns:
      Advantages and value targets (advantage + value), float32 `[T, B]`; both are 0
      for steps that are not valid.
    """
    zero = tf.zeros_like(reward)
    bootstrap = tf.where(terminated, zero, next_value)
    delta = tf.where(valid, reward + discount * bootstrap - value, zero)
    continues = valid & ~(terminated | truncated)
    decay = tf.where(continues, zero + discount * gae_lambda, zero)
    advantage = _reverse_linear_scan(delta, decay)
    return advantage, tf.where(valid, advantage + value, zero)


def _reverse_linear_scan(addend: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Solve `y[t] = addend[t] + factor[t] * y[t + 1]`, `y[T] = 0`, along axis 0.

    Recursive doubling: after k rounds, `addend` sums the next 2**k rows. Under XLA,
    these log2(T) rounds over the whole array are cheaper than a loop over time.
    """
    horizon = addend.shape[0]
    distance = 1
    while distance < horizon:
        padding = tf.zeros_like(addend[:distance])
        later_addend = tf.concat([addend[distance:], padding], axis=0)
        later_factor = tf.concat([factor[distance:], padding], axis=0)
        addend = addend + factor * later_addend
        factor = factor * later_factor
        distance *= 2
    return addend
