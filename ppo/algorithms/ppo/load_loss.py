"""Load the policy loss: the built-in one, or a function that the config names.

A user's loss is traced and compiled as part of the update.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ppo.agent.actions.distributions import Categorical, DiagonalGaussian
from ppo.config.config import Config
from ppo.errors import ConfigError
from ppo.learning import losses
from ppo.user_code import load_user_code, source_location, user_code_errors


def load_policy_loss(
    config: Config, *, is_tested: bool = True
) -> Callable[..., tf.Tensor]:
    """Return the policy loss that the config names.

    With `is_tested`, a user's loss is first called on a small batch in which all ratios
    are 1, unless the loss uses observations or the model. The action space is not known
    yet, so it suffices that the loss accepts either categorical or Gaussian actions.

    Raises:
      ConfigError: The function does not exist, expects arguments that are not
        available, raises, or does not return a scalar with a non-zero gradient.
    """
    if ":" not in config.objective:
        return losses.policy_loss
    label = f"objective {config.objective}"
    function = load_user_code("objective", config.objective)

    @tf.autograph.experimental.do_not_convert
    def policy_loss(**terms: Any) -> tf.Tensor:
        with user_code_errors(label, function):
            inspect.signature(function).bind(**terms)
            loss = function(**terms)
        if getattr(loss, "shape", None) != () or loss.dtype != tf.float32:
            raise ConfigError(
                f"{label}: {source_location(function)}expected a float32 scalar, for "
                f"example a mean over rows, got {loss}."
            )
        return loss

    uses_network = {"observation", "model"} & set(
        inspect.signature(function).parameters
    )
    if uses_network or not is_tested:
        return policy_loss
    rows, action = tf.reshape(tf.range(6.0), [3, 2]), tf.constant([0, 1, 1], tf.int64)
    test = tf.function(_loss_and_norm, autograph=False, jit_compile=config.jit_compile)
    with user_code_errors(label, function):
        try:
            loss, norm = test(policy_loss, Categorical, [rows], action)
        except ConfigError:
            loss, norm = test(policy_loss, DiagonalGaussian, [rows, -rows], rows)
    if not (abs(loss) < tf.float32.max and 0.0 < norm < tf.float32.max):
        raise ConfigError(
            f"{label}: {source_location(function)}expected a finite loss and a finite, "
            f"non-zero gradient when all ratios are 1; got loss {loss}, gradient "
            f"norm {norm}."
        )
    return policy_loss


def _loss_and_norm(
    policy_loss: Any, distribution: Any, parameters: Any, action: tf.Tensor
) -> Any:
    """Return the loss of a small batch, and the norm of its gradient.

    The old and the new policy are equal, so all ratios are 1.
    """
    number = tf.constant([1.0, -0.5, 0.0])
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        old = distribution(*map(tf.stop_gradient, parameters))
        new = distribution(*parameters)
        loss = policy_loss(
            log_ratio=new.log_prob(action) - old.log_prob(action),
            weight=tf.constant([1.0, 1.0, 0.0]),
            clip_range=tf.constant(0.2),
            **{"advantage": number, "value": number, "target": number},
            **{"old": old, "new": new, "action": action},
            **{"observation": None, "model": None},
        )
    gradient = tape.gradient(loss, parameters, unconnected_gradients="zero")
    return loss, tf.linalg.global_norm(gradient)
