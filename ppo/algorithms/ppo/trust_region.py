"""Keep the updated policy close to the policy that collected the rollout.

Ratio clipping alone is not enough: the gradient of a clipped ratio is 0, so nothing
moves the ratio back. Therefore the update measures the KL divergence after every epoch
and rolls back an epoch that moved the policy too far. Gradients are clipped per
network, so that a large gradient after many small ones does not cause a large step.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ppo.config.config import Config
from ppo.user_code import load_user_code, user_code_errors


def make_optimizer(config: Config) -> keras.optimizers.Optimizer:
    """Return the optimizer that a config names.

    Raises:
      ConfigError: A custom function does not exist, raises, or does not return an
        optimizer whose learning rate can be assigned.
    """
    if ":" not in config.optimizer:
        optimizer = keras.optimizers.get(config.optimizer)
        optimizer.learning_rate = config.learning_rate
        if config.optimizer.startswith("adam"):
            optimizer.epsilon = config.adam_epsilon
        return optimizer
    function = load_user_code("optimizer", config.optimizer)
    with user_code_errors(f"optimizer {config.optimizer}", function):
        optimizer = function(config)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"expected a keras Optimizer, got {optimizer!r}")
        optimizer.learning_rate = config.learning_rate  # fails if it has a schedule
    return optimizer


class EpochRollback:
    """Restores variables to their values before an epoch.

    Adam's first moments are restored as well; otherwise, they would keep moving the
    variables in the direction that was just undone. Adam's second moments are kept,
    because they make the next steps smaller. For optimizers other than Adam, momentum
    is restored.

    Args:
      variables: Variables to restore.
      optimizer: Optimizer that was built with these variables, among others.
    """

    def __init__(self, variables: Sequence[Any], optimizer: keras.optimizers.Optimizer):
        # Keras derives the names of slots from those of variables.
        kinds = ("momentum", "linear")  # Ftrl computes variables from the latter
        paths = [variable.path.replace("/", "_") for variable in variables]
        names = {f"{path}_{kind}" for path in paths for kind in kinds}
        momentums = [slot for slot in optimizer.variables if slot.name in names]
        self._variables = [variable.value for variable in (*variables, *momentums)]

    @tf.autograph.experimental.do_not_convert
    def save(self) -> list[tf.Tensor]:
        """Return the current values of the variables, to pass to `restore` later."""
        return [variable.read_value() for variable in self._variables]

    @tf.autograph.experimental.do_not_convert
    def restore(self, saved: Sequence[tf.Tensor], condition: tf.Tensor) -> None:
        """Restore values from `save` if `condition`, a bool scalar, is true."""
        for variable, before in zip(self._variables, saved, strict=True):
            variable.assign(tf.where(condition, before, variable))


def clip_by_network(
    gradients: Sequence[tf.Tensor], networks: Sequence[Sequence[int]], max_norm: float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Clip the gradients of each network to a maximum norm.

    Args:
      gradients: Gradients of all variables.
      networks: For each network, the indices of its gradients in `gradients`.
      max_norm: Maximum global norm of the gradients of one network.

    Returns:
      The clipped gradients, and the global norm of all gradients before clipping.
    """
    clipped, norms = list(gradients), []
    for indices in networks:
        scaled, norm = tf.clip_by_global_norm([gradients[i] for i in indices], max_norm)
        norms.append(norm)
        for index, gradient in zip(indices, scaled, strict=True):
            clipped[index] = gradient
    return clipped, tf.linalg.norm(tf.stack(norms))
