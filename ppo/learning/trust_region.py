"""What keeps one iteration's policy near the policy that collected its steps.

Clipped ratios alone do not: once most of them are outside the clip range, nothing pulls
them back. So the divergence is measured after every epoch, and an epoch that moved the
policy too far is undone; and gradients are clipped to what is usual for their network,
so that one large gradient after a long calm is one step like the others.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class EpochRollback:
    """Restores variables to their values before an epoch.

    Adam's first moments are restored as well, because they would continue in the wrong
    direction. Its second moments stay: they make the following steps smaller.

    Args:
        variables: The variables to restore.
        optimizer: Adam, built for these variables among others.
    """

    def __init__(self, variables: Sequence[Any], optimizer: keras.optimizers.Adam):
        momentums = [
            optimizer._momentums[optimizer._get_variable_index(variable)]
            for variable in variables
        ]
        self._variables = [variable.value for variable in (*variables, *momentums)]

    def save(self) -> list[tf.Tensor]:
        """Return the current values, for `restore`."""
        return [variable.read_value() for variable in self._variables]

    def restore(self, saved: Sequence[tf.Tensor], condition: tf.Tensor) -> None:
        """Restore all values if `condition`, a bool scalar, is true."""
        for variable, before in zip(self._variables, saved, strict=True):
            variable.assign(tf.where(condition, before, variable))


def clip_by_network(
    gradients: Sequence[tf.Tensor], networks: Sequence[Sequence[int]], max_norm: float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scale the gradients of each network, given by their indices, down to a norm.

    Returns:
        The gradients to be applied, and the norm of all of them before.
    """
    clipped, norms = list(gradients), []
    for indices in networks:
        own, norm = tf.clip_by_global_norm([gradients[i] for i in indices], max_norm)
        norms.append(norm)
        for index, gradient in zip(indices, own, strict=True):
            clipped[index] = gradient
    return clipped, tf.linalg.norm(tf.stack(norms))
