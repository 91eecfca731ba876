"""What a policy has to know of an action space, in one object per kind of space.

How many numbers its network gives per row, which distribution they stand for, how
sampled actions are stored, and how they become the env's own.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.actions.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
)
from ppo.actions.multi_categorical import MultiCategorical, masked_logits
from ppo.errors import UnsupportedSpaceError

__all__ = ["ActionKind", "action_kind"]


class ActionKind(Protocol):
    """One kind of action space."""

    @property
    def distribution_type(self) -> type[Any]:
        """The type of what `distribution` returns."""

    @property
    def output_size(self) -> int:
        """Numbers per row that the policy network gives: means or logits."""

    @property
    def choice_sizes(self) -> Sequence[int] | None:
        """Options of each choice, which a mask may forbid; None without choices."""

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw what sampling so many actions needs, `[num_rows, ...]`."""

    def distribution(self, parameters: Sequence[tf.Tensor], allowed: Any) -> Any:
        """Return the distribution for what the policy gave.

        Args:
            parameters: logits; or means and log standard deviations.
            allowed: bool `[N, output_size]`, or None if everything is.
        """

    def spec(self, num_rows: int) -> tf.TensorSpec:
        """Describe so many of the actions that the distribution samples."""

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        """Turn sampled actions, of any number of rows, into the env's own."""


def action_kind(space: gymnasium.Space[Any]) -> ActionKind:
    """Return what to know of a space.

    Raises:
        UnsupportedSpaceError: no policy can act in it.
    """
    if isinstance(space, gymnasium.spaces.Box):
        return _BoxActions(space)
    if isinstance(space, gymnasium.spaces.Discrete):
        return _DiscreteActions(space)
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.size:
        return _MultiDiscreteActions(space)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return _MultiBinaryActions(space)
    raise UnsupportedSpaceError(
        "Action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got "
        f"{space}; wrap the env so that its actions are one of these."
    )


class _BoxActions:
    """-1 and 1 stand for finite bounds; what lies beyond is clipped."""

    distribution_type = DiagonalGaussian
    choice_sizes = None

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        self._space: Any = space
        self.output_size = math.prod(space.shape)

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return DiagonalGaussian.draw_noise(num_rows, self.output_size, seed)

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> Distribution:
        return DiagonalGaussian(*parameters)

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows, self.output_size], tf.float32)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        space = self._space
        if len(space.shape) != 1:
            action = tf.reshape(action, [-1, *space.shape])
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        # float64: the width of a float32 space may not fit into float32.
        low = np.where(bounded, space.low, -1.0).astype(np.float64)
        high = np.where(bounded, space.high, 1.0).astype(np.float64)
        centre, radius = (low + high) / 2, (high - low) / 2
        if (centre != 0.0).any() or (radius != 1.0).any():
            action = centre + radius * tf.cast(action, tf.float64)
        if space.dtype.kind in "iu":  # a cast would wrap around what lies beyond
            action = tf.round(tf.cast(action, tf.float64))
            action = tf.clip_by_value(action, low, high)
        action = tf.cast(action, space.dtype)
        is_unlimited = np.isinf(space.low).all() and np.isinf(space.high).all()
        if is_unlimited:
            return action
        return tf.clip_by_value(action, space.low, space.high)


class _DiscreteActions:
    """A choice, counted from 0."""

    distribution_type = Categorical

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self._space: Any = space
        self.output_size = int(space.n)
        self.choice_sizes = [self.output_size]

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return Categorical.draw_noise(num_rows, self.output_size, seed)

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> Distribution:
        (logits,) = parameters
        return Categorical(
            logits if allowed is None else masked_logits(logits, allowed)
        )

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        dtype = self._space.dtype
        return tf.cast(action, dtype) + np.asarray(self._space.start, dtype)


class _MultiDiscreteActions:
    """Choices, each counted from 0, in the order of the flattened space."""

    distribution_type = MultiCategorical

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        self._space: Any = space
        self.choice_sizes = [int(size) for size in np.ravel(space.nvec)]
        self.output_size = sum(self.choice_sizes)

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        size = len(self.choice_sizes) * max(self.choice_sizes)
        return MultiCategorical.draw_noise(num_rows, size, seed)

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> Distribution:
        (logits,) = parameters
        return MultiCategorical.of(logits, self.choice_sizes, allowed)

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows, len(self.choice_sizes)], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        dtype = self._space.dtype
        action = tf.reshape(tf.cast(action, dtype), [-1, *self._space.shape])
        return action + np.asarray(self._space.start, dtype)


class _MultiBinaryActions:
    """Bits, in the order of the flattened space."""

    distribution_type = Bernoulli
    choice_sizes = None

    def __init__(self, space: gymnasium.spaces.MultiBinary) -> None:
        self._space: Any = space
        self.output_size = math.prod(space.shape)

    def draw_noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return Bernoulli.draw_noise(num_rows, self.output_size, seed)

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> Distribution:
        return Bernoulli(*parameters)

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows, self.output_size], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        shape = [-1, *self._space.shape]
        return tf.reshape(tf.cast(action, self._space.dtype), shape)
