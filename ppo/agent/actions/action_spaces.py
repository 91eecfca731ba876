"""Adapters between policies and action spaces, one per kind of space.

An adapter determines the number of network outputs, the distribution that they
parametrise, the shape of the action mask, and how sampled actions are stored and mapped
to env actions.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.agent.actions.distributions import (
    FORBIDDEN,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
    masked_logits,
    masked_logits_in_numpy,
)
from ppo.config.config import Config
from ppo.environments import MASK_KEY
from ppo.errors import UnsupportedSpaceError
from ppo.spaces import check_action_space

#: Types of spaces whose values can be the flags of an action mask.
_MASK_SPACES = (
    gymnasium.spaces.Box,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)


class ActionAdapter:
    """Adapter between a policy and an action space.

    Attributes:
      output_size: Number of outputs of the policy network per row.
      noise_size: Number of noise values per row that sampling needs. A subclass of
        `Agent` may increase it.
    """

    distribution_type: type[Any]
    """Type of the action distribution."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self.output_size = self.noise_size = math.prod(space.shape)
        # Number of options of each choice; empty if the space does not support masks.
        self._choice_sizes: list[int] = []
        self._start = np.asarray(getattr(space, "start", 0), space.dtype)
        self._is_shifted = bool(self._start.any())

    def noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Return noise for sampling actions, `[num_rows, noise_size]`.

        Args:
          num_rows: Number of actions.
          seed: int32 pair.
        """
        return self.distribution_type.noise(num_rows, self.noise_size, seed)

    def distribution(self, parameters: Sequence[tf.Tensor], allowed: Any) -> Any:
        """Return the action distribution.

        Args:
          parameters: Logits, or means and log standard deviations.
          allowed: The action mask, bool `[N, output_size]`, or None to allow all.
        """
        return self.distribution_type(*parameters)

    def sample_in_numpy(
        self, parameters: Sequence[np.ndarray], allowed: Any, noise: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return sampled actions, and the parameters of their distribution.

        This is equivalent to `distribution(parameters, allowed).sample(noise)`.
        """
        raise NotImplementedError

    def spec(self, num_rows: int) -> tf.TensorSpec:
        """Return the shape and dtype of `num_rows` sampled actions."""
        return tf.TensorSpec([num_rows, math.prod(self._space.shape)], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        """Map sampled actions, one per row, to env actions."""
        dtype = self._space.dtype
        rows = tf.reshape(tf.cast(action, dtype), [-1, *self._space.shape])
        return rows + self._start

    def to_env_action_in_numpy(self, action: np.ndarray) -> np.ndarray:
        """Return the result of `to_env_action` for a NumPy array."""
        rows = action.astype(self._space.dtype, copy=False)
        rows = rows.reshape(-1, *self._space.shape)
        return rows + self._start if self._is_shifted else rows

    def check_mask(self, observation_space: gymnasium.Space[Any]) -> None:
        """Check that the action mask, if any, has one flag per action.

        Raises:
          UnsupportedSpaceError: The mask has the wrong shape, the action space does
            not support masks, or observations contain nothing but the mask.
        """
        if not (
            isinstance(observation_space, gymnasium.spaces.Dict)
            and MASK_KEY in observation_space.spaces
        ):
            return
        where = f"observation[{MASK_KEY!r}]"
        mask: Any = observation_space[MASK_KEY]
        sizes = self._choice_sizes
        if not sizes:
            raise UnsupportedSpaceError(
                f"{where}: expected a Discrete or MultiDiscrete action space, got "
                f"{self._space}; replace MultiBinary(n) with MultiDiscrete([2] * n), "
                "or, if this is not an action mask, rename the key."
            )
        is_split = isinstance(mask, gymnasium.spaces.Tuple)
        parts, expected = (mask.spaces, sizes) if is_split else ([mask], [sum(sizes)])
        got = [part.shape if isinstance(part, _MASK_SPACES) else None for part in parts]
        if got != [(size,) for size in expected]:
            shapes = ", ".join(f"[{size}]" for size in expected)
            raise UnsupportedSpaceError(
                f"{where}: expected flags {shapes} (a MultiBinary, or a Box from 0 to "
                f"1) for the actions {self._space}, got {mask}; declare one flag per "
                "action."
            )
        if len(observation_space.spaces) == 1:
            raise UnsupportedSpaceError(
                f"{where}: expected at least one observation in addition to the mask; "
                "add a key to the Dict."
            )


def make_action_adapter(
    space: gymnasium.Space[Any], config: Config | None = None
) -> ActionAdapter:
    """Return the adapter for an action space.

    Args:
      space: The action space of one env.
      config: The config, which selects the distribution of Box actions. Without a
        config, the distribution is Gaussian.

    Raises:
      UnsupportedSpaceError: The space is not supported, or the distribution in the
        config does not support it.
    """
    check_action_space(space)
    if isinstance(space, gymnasium.spaces.Box):
        return _BoxActions(space, config)
    if isinstance(space, gymnasium.spaces.Discrete):
        return _DiscreteActions(space)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return _MultiDiscreteActions(space)
    return _MultiBinaryActions(space)


class _BoxActions(ActionAdapter):
    """Adapter for real or integer vectors.

    If the bounds are finite, [-1, 1] is mapped to the range between the bounds. Values
    outside the bounds are clipped; a squashed Gaussian never produces such values.
    """

    distribution_type = DiagonalGaussian

    def __init__(self, space: gymnasium.spaces.Box, config: Config | None) -> None:
        super().__init__(space)
        is_bounded = space.bounded_below & space.bounded_above
        # Use float64, because the sum of two float32 bounds can overflow.
        self._low = np.where(is_bounded, space.low, -1.0).astype(np.float64)
        self._high = np.where(is_bounded, space.high, 1.0).astype(np.float64)
        self._centre = self._low / 2 + self._high / 2
        self._radius = self._high / 2 - self._low / 2
        self._is_scaled = bool((self._centre != 0).any() or (self._radius != 1).any())
        if space.dtype.kind in "iu":
            # In float64, the largest 64-bit integers are rounded up to a power of two,
            # which would wrap around when it is cast back.
            bits = 8 * space.dtype.itemsize - (space.dtype.kind == "i")
            limit = math.nextafter(2.0**bits, 0.0)
            self._low = space.low.astype(np.float64)
            self._high = np.minimum(space.high.astype(np.float64), limit)
        self._is_clipped = not (
            np.isinf(space.low).all() and np.isinf(space.high).all()
        )
        # If all elements have the same bound, use a scalar, because NumPy then clips
        # actions in a third of the time.
        self._limits = [
            np.array(bound.flat[0]) if (bound == bound.flat[0]).all() else bound
            for bound in (space.low, space.high)
        ]
        if config is None:
            return
        if config.state_dependent_std:
            self.output_size *= 2
        if config.action_distribution == "squashed_gaussian":
            self.distribution_type = SquashedGaussian
            if not space.is_bounded():
                raise UnsupportedSpaceError(
                    "action_distribution squashed_gaussian: expected a Box with finite "
                    f"bounds, got {space}; set action_distribution=gaussian."
                )

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows, math.prod(self._space.shape)], tf.float32)

    def sample_in_numpy(
        self, parameters: Sequence[np.ndarray], allowed: Any, noise: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        mean, log_std = parameters
        return mean + np.exp(log_std) * noise, (mean, log_std)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        space = self._space
        if self.distribution_type is SquashedGaussian:
            action = tf.tanh(action)
        if len(space.shape) != 1:
            action = tf.reshape(action, [-1, *space.shape])
        if self._is_scaled:
            action = self._centre + self._radius * tf.cast(action, tf.float64)
        if space.dtype.kind in "iu":  # values outside the bounds would wrap around
            action = tf.round(tf.cast(action, tf.float64))
            action = tf.clip_by_value(action, self._low, self._high)
        action = tf.cast(action, space.dtype)
        if not self._is_clipped:
            return action
        return tf.clip_by_value(action, space.low, space.high)

    def to_env_action_in_numpy(self, action: np.ndarray) -> np.ndarray:
        space = self._space
        if self.distribution_type is SquashedGaussian:
            action = np.tanh(action)
        if len(space.shape) != 1:
            action = action.reshape(-1, *space.shape)
        if self._is_scaled:
            action = self._centre + self._radius * action
        if space.dtype.kind in "iu":
            action = np.rint(action, dtype=np.float64)
            # In float64, large bounds are rounded; they are exact after this cast.
            action = np.clip(action, self._low, self._high).astype(space.dtype)
        if self._is_clipped:  # before the cast, which could overflow
            low, high = self._limits
            action = np.maximum(action, low)
            np.minimum(action, high, out=action)
        return action.astype(space.dtype, copy=False)


class _DiscreteActions(ActionAdapter):
    """Adapter for Discrete spaces; the policy numbers the actions from 0."""

    distribution_type = Categorical

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        super().__init__(space)
        self.output_size = self.noise_size = int(space.n)
        self._choice_sizes = [self.output_size]

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> Categorical:
        (logits,) = parameters
        return Categorical(
            logits if allowed is None else masked_logits(logits, allowed)
        )

    def sample_in_numpy(
        self, parameters: Sequence[np.ndarray], allowed: Any, noise: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        (logits,) = parameters
        if allowed is not None:
            logits = masked_logits_in_numpy(logits, allowed)
        return (logits + noise).argmax(axis=-1), (logits,)

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows], tf.int64)


class _MultiDiscreteActions(ActionAdapter):
    """Adapter for MultiDiscrete spaces: several choices, in flattened order.

    The policy numbers the options of each choice from 0.
    """

    distribution_type = MultiCategorical

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        super().__init__(space)
        sizes = [int(size) for size in np.ravel(space.nvec)]
        self._choice_sizes = sizes
        self.output_size, self.noise_size = sum(sizes), len(sizes) * max(sizes)
        # Mask of the options that exist, bool `[D, max(sizes)]`: choices with fewer
        # options are padded.
        self._exists = np.arange(max(sizes)) < np.c_[sizes]

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> MultiCategorical:
        (logits,) = parameters
        return MultiCategorical.from_logits(logits, self._choice_sizes, allowed)

    def sample_in_numpy(
        self, parameters: Sequence[np.ndarray], allowed: Any, noise: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        (all_logits,) = parameters
        exists = self._exists
        logits = np.zeros((len(all_logits), *exists.shape), np.float32)
        logits[:, exists] = all_logits
        if allowed is not None:
            mask = np.zeros(logits.shape, np.bool_)
            mask[:, exists] = allowed
            logits = masked_logits_in_numpy(logits, mask)
        logits[:, ~exists] = FORBIDDEN
        return np.argmax(logits + noise.reshape(logits.shape), axis=-1), (logits,)


class _MultiBinaryActions(ActionAdapter):
    """Adapter for MultiBinary spaces: independent bits, in flattened order."""

    distribution_type = Bernoulli

    def sample_in_numpy(
        self, parameters: Sequence[np.ndarray], allowed: Any, noise: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        (logits,) = parameters
        return (logits + noise > 0).astype(np.int64), (logits,)
