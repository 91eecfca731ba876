"""Which loss the policy has: ours, or a function of the user's that the config names.

That is traced into the update, and compiled with it; see `docs/research.md`.
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


def policy_loss_of(config: Config) -> Callable[..., tf.Tensor]:
    """Return the policy's loss; one of the user's is tried out with ratios of 1.

    The env's kind of actions is not known by now: the loss has to suit one of two.

    Raises:
        ConfigError: there is no such function, it takes other terms than there are, it
            raises, or what it gives is no scalar with a gradient to follow.
    """
    if ":" not in config.objective:
        return losses.policy_loss
    what, own = (
        f"objective {config.objective}",
        load_user_code("objective", config.objective),
    )

    @tf.autograph.experimental.do_not_convert
    def policy_loss(**terms: Any) -> tf.Tensor:
        with user_code_errors(what, own):
            inspect.signature(own).bind(**terms)
            loss = own(**terms)
        if getattr(loss, "shape", None) != () or loss.dtype != tf.float32:
            raise ConfigError(
                f"{what}: {source_location(own)}expected a scalar of float32, such as "
                f"a mean over rows, got {loss}."
            )
        return loss

    rows, choice = tf.reshape(tf.range(6.0), [3, 2]), tf.constant([0, 1, 1], tf.int64)
    slope = tf.function(_slope, autograph=False, jit_compile=config.jit_compile)
    with user_code_errors(what, own):
        try:
            loss, norm = slope(policy_loss, Categorical, [rows], choice)
        except ConfigError:
            loss, norm = slope(policy_loss, DiagonalGaussian, [rows, -rows], rows)
    if not (abs(loss) < tf.float32.max and 0.0 < norm < tf.float32.max):
        raise ConfigError(
            f"{what}: {source_location(own)}expected a finite loss and gradient where "
            "all ratios are 1, and one that is not 0; got "
            f"{loss}, with a norm of {norm}."
        )
    return policy_loss


def _slope(policy_loss: Any, kind: Any, parameters: Any, action: tf.Tensor) -> Any:
    """Return the loss where the old policy is the new one, and its gradient's norm."""
    number = tf.constant([1.0, -0.5, 0.0])
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        old, new = kind(*map(tf.stop_gradient, parameters)), kind(*parameters)
        loss = policy_loss(
            log_ratio=new.log_prob(action) - old.log_prob(action),
            weight=tf.constant([1.0, 1.0, 0.0]),
            clip_range=tf.constant(0.2),
            **{"advantage": number, "value": number, "target": number},
            **{"old": old, "new": new, "action": action},
        )
    slope = tape.gradient(loss, parameters, unconnected_gradients="zero")
    return loss, tf.linalg.global_norm(slope)
