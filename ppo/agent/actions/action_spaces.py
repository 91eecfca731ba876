"""What a policy has to know of an action space, in one object per kind of space.

How many numbers its network gives per row, which distribution they stand for, which
flags can forbid a choice, how sampled actions are stored, and how they become the env's
own.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.agent.actions.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
    masked_logits,
)
from ppo.config.config import Config
from ppo.errors import UnsupportedSpaceError

MASK_KEY = "action_mask"
"""Where flags say which actions are allowed, in the outermost Dict of an observation.

As in PettingZoo, there is one per action. For MultiDiscrete they are those of all
choices in a row, as in SB3-contrib, or a Tuple with the flags of each choice, as
`MultiDiscrete.sample` takes them."""

_FLAGS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)


class ActionAdapter:
    """One kind of action space.

    Attributes:
        output_size: numbers per row that the policy network gives.
        noise_size: numbers per row that sampling takes.
    """

    distribution_type: type[Any]
    """The type of what `distribution` returns."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self.output_size = self.noise_size = math.prod(space.shape)
        self._choice_sizes: list[int] = []  # options of each, which a mask may forbid

    def noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw what sampling so many actions needs, `[num_rows, noise_size]`."""
        return self.distribution_type.noise(num_rows, self.noise_size, seed)

    def distribution(self, parameters: Sequence[tf.Tensor], allowed: Any) -> Any:
        """Return the distribution for logits, or means and log standard deviations.

        `allowed` is bool `[N, output_size]`, or None if everything is.
        """
        return self.distribution_type(*parameters)

    def spec(self, num_rows: int) -> tf.TensorSpec:
        """Describe so many of the actions that the distribution samples."""
        return tf.TensorSpec([num_rows, math.prod(self._space.shape)], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        """Turn sampled actions, of any number of rows, into the env's own."""
        dtype = self._space.dtype
        return tf.reshape(tf.cast(action, dtype), [-1, *self._space.shape])

    def check_mask(self, observation_space: gymnasium.Space[Any]) -> None:
        """Check that a mask, if observations have one, has a flag for every action.

        Raises:
            UnsupportedSpaceError: it does not fit, or nothing else is observed.
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
                f"{self._space}; bits can be a MultiDiscrete of twos, and what is no "
                "mask needs another name."
            )
        is_split = isinstance(mask, gymnasium.spaces.Tuple)
        parts, wanted = (mask.spaces, sizes) if is_split else ([mask], [sum(sizes)])
        got = [part.shape if isinstance(part, _FLAGS) else None for part in parts]
        if got != [(size,) for size in wanted]:
            shapes = ", ".join(f"[{size}]" for size in wanted)
            raise UnsupportedSpaceError(
                f"{where}: expected flags {shapes} (a MultiBinary, or a Box from 0 to "
                f"1) for the actions {self._space}, got {mask}; declare one flag per "
                "action."
            )
        if len(observation_space.spaces) == 1:
            raise UnsupportedSpaceError(
                f"{where}: expected something to observe besides it; add a key to the "
                "Dict."
            )


def make_action_adapter(
    space: gymnasium.Space[Any], config: Config | None = None
) -> ActionAdapter:
    """Return what to know of a space; a config says how Boxes are acted in.

    Raises:
        UnsupportedSpaceError: no policy can act in it, or not as the config says.
    """
    if isinstance(space, gymnasium.spaces.Box):
        return _BoxActions(space, config)
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


class _BoxActions(ActionAdapter):
    """-1 and 1 stand for finite bounds; what lies beyond is clipped, or squashed."""

    distribution_type = DiagonalGaussian

    def __init__(self, space: gymnasium.spaces.Box, config: Config | None) -> None:
        super().__init__(space)
        if space.dtype == bool or not self.output_size:
            raise UnsupportedSpaceError(
                "Action space: expected a Box of numbers, one at least, got "
                f"{space}; make bits a MultiBinary."
            )
        if config is None:
            return
        if config.state_dependent_std:
            self.output_size *= 2
        if config.action_distribution == "squashed_gaussian":
            self.distribution_type = SquashedGaussian
            if not space.is_bounded():
                raise UnsupportedSpaceError(
                    "action_distribution squashed_gaussian: expected a Box with finite "
                    f"bounds, got {space}; choose gaussian."
                )

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows, self.noise_size], tf.float32)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        space = self._space
        if self.distribution_type is SquashedGaussian:
            action = tf.tanh(action)
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


class _DiscreteActions(ActionAdapter):
    """A choice, counted from 0."""

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

    def spec(self, num_rows: int) -> tf.TensorSpec:
        return tf.TensorSpec([num_rows], tf.int64)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        dtype = self._space.dtype
        return tf.cast(action, dtype) + np.asarray(self._space.start, dtype)


class _MultiDiscreteActions(ActionAdapter):
    """Choices, each counted from 0, in the order of the flattened space."""

    distribution_type = MultiCategorical

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        super().__init__(space)
        sizes = [int(size) for size in np.ravel(space.nvec)]
        self._choice_sizes = sizes
        self.output_size, self.noise_size = sum(sizes), len(sizes) * max(sizes)

    def distribution(
        self, parameters: Sequence[tf.Tensor], allowed: Any
    ) -> MultiCategorical:
        (logits,) = parameters
        return MultiCategorical.from_logits(logits, self._choice_sizes, allowed)

    def to_env_action(self, action: tf.Tensor) -> tf.Tensor:
        start = np.asarray(self._space.start, self._space.dtype)
        return super().to_env_action(action) + start


class _MultiBinaryActions(ActionAdapter):
    """Bits, in the order of the flattened space."""

    distribution_type = Bernoulli
