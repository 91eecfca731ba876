"""What networks see of an observation: float32 leaves of moderate size.

Box leaves are normalised by running statistics, images scaled to [0, 1], discrete
leaves one-hot encoded. The structure (dict, tuple) of the observation space is kept.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.errors import UnsupportedSpaceError
from ppo.normalize import RunningMoments

__all__ = ["ObservationPreprocessor", "space_leaves"]


def space_leaves(space: gymnasium.Space[Any], path: str = "observation") -> Any:
    """Turn Dict and Tuple spaces into dicts and tuples of their leaf spaces.

    Returns:
        A nest for `tf.nest` with a non-composite space at every leaf.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return {
            name: space_leaves(part, f"{path}[{name!r}]")
            for name, part in space.spaces.items()
        }
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(
            space_leaves(part, f"{path}[{index}]")
            for index, part in enumerate(space.spaces)
        )
    if _leaf_kind(space) is None:
        raise UnsupportedSpaceError(
            f"{path}: expected Box, Discrete, MultiBinary, MultiDiscrete, or a Dict or "
            f"Tuple of those, got {space}; wrap the env to encode it as a Box."
        )
    return space


class ObservationPreprocessor:
    """Maps raw observations to network inputs, and keeps the statistics for it."""

    def __init__(
        self, space: gymnasium.Space[Any], *, normalize: bool, clip: float
    ) -> None:
        self._spaces = space_leaves(space)
        self._leaves = [
            _Leaf(leaf, normalize=normalize, clip=clip)
            for leaf in tf.nest.flatten(self._spaces)
        ]

    @property
    def size(self) -> int:
        """Number of network inputs over all leaves."""
        return sum(leaf.size for leaf in self._leaves)

    @property
    def trackables(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name."""
        moments = [leaf.moments for leaf in self._leaves]
        return {
            f"leaf_{index}": tf.train.Checkpoint(**leaf_moments.trackables)
            for index, leaf_moments in enumerate(moments)
            if leaf_moments is not None
        }

    def __call__(self, observation: Any) -> Any:
        """Preprocess an observation with rows `[N, ...]`.

        Returns:
            The same structure with float32 leaves `[N, ...]`.
        """
        arrays = tf.nest.flatten(observation)
        features = [
            leaf.preprocess(array)
            for leaf, array in zip(self._leaves, arrays, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spaces, features)

    def statistics(self) -> dict[str, float]:
        """Return the range of means and standard deviations, if there are any."""
        moments = [leaf.moments for leaf in self._leaves if leaf.moments is not None]
        if not moments:
            return {}
        means = np.concatenate([np.ravel(part.mean) for part in moments])
        deviations = np.sqrt(np.concatenate([np.ravel(p.variance) for p in moments]))
        return {
            "observation_mean_min": float(means.min()),
            "observation_mean_max": float(means.max()),
            "observation_std_min": float(deviations.min()),
            "observation_std_max": float(deviations.max()),
        }

    def update(self, observation: Any, mask: Any) -> None:
        """Take rows `[N, ...]` into the statistics where `mask` `[N]` is true."""
        for leaf, array in zip(self._leaves, tf.nest.flatten(observation), strict=True):
            if leaf.moments is not None:
                leaf.moments.update(tf.convert_to_tensor(array), mask)


class _Leaf:
    """One leaf of the observation space and its statistics, if it has any."""

    def __init__(
        self, space: gymnasium.Space[Any], *, normalize: bool, clip: float
    ) -> None:
        self._space: Any = space
        self._kind = _leaf_kind(space)
        self._clip = clip
        self.size = _encoded_size(space)
        self.moments: RunningMoments | None = None
        if normalize and self._kind == "box":
            self.moments = RunningMoments(tuple(space.shape or ()))

    def preprocess(self, array: tf.Tensor) -> tf.Tensor:
        if self.moments is not None:
            return self.moments.normalize(array, self._clip)
        if self._kind == "image":
            return tf.cast(array, tf.float32) / 255.0
        if self._kind == "discrete":
            zero_based = tf.cast(array, tf.int64) - int(self._space.start)
            return tf.one_hot(zero_based, int(self._space.n))
        if self._kind == "multi_discrete":
            return _one_hot_each(array, self._space)
        return tf.cast(array, tf.float32)


def _one_hot_each(array: tf.Tensor, space: Any) -> tf.Tensor:
    """Encode each component of a MultiDiscrete row, and join the codes, `[N, D]`."""
    sizes = np.ravel(space.nvec)
    zero_based = tf.cast(array, tf.int64) - np.asarray(space.start, np.int64)
    columns = tf.reshape(zero_based, [-1, len(sizes)])
    codes = [tf.one_hot(columns[:, i], int(size)) for i, size in enumerate(sizes)]
    return tf.concat(codes, axis=1)


def _leaf_kind(space: gymnasium.Space[Any]) -> str | None:
    if isinstance(space, gymnasium.spaces.Box):
        is_image = space.dtype == np.uint8 and len(space.shape) >= 2
        return "image" if is_image else "box"
    if isinstance(space, gymnasium.spaces.Discrete):
        return "discrete"
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return "multi_discrete"
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return "multi_binary"
    return None


def _encoded_size(space: Any) -> int:
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return int(np.sum(space.nvec))
    return math.prod(space.shape)
