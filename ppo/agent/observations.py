"""Preprocess observations into float32 network inputs.

Box leaves are normalised with running statistics, images are scaled to [0, 1], and
discrete leaves are one-hot encoded. The structure (dict, tuple) of the observation
space is preserved. Images stay uint8 until a network needs them, and the action mask is
separated from the inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.agent.normalize import RunningMoments
from ppo.environments import MASK_KEY
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.spaces import leaf_kind, space_leaves


class ObservationPreprocessor:
    """Preprocesses raw observations, and maintains the statistics for normalisation.

    Calling the preprocessor returns features, which a rollout can store; `inputs` turns
    features into network inputs.

    Args:
      space: Observation space of one env.
      normalize: Whether to normalise Box leaves that are not images.
      clip: Maximum absolute value of normalised observations.

    Attributes:
      trackables: Objects that a checkpoint must store, by name.
    """

    def __init__(
        self, space: gymnasium.Space[Any], *, normalize: bool, clip: float
    ) -> None:
        self._spaces = space_leaves(space)
        self._has_mask = isinstance(self._spaces, dict) and MASK_KEY in self._spaces
        if self._has_mask:
            self._mask_space = self._spaces.pop(MASK_KEY)
        self._leaves = [
            _Leaf(leaf, normalize=normalize, clip=clip)
            for leaf in tf.nest.flatten(self._spaces)
        ]
        self.trackables = {
            f"leaf_{index}": tf.train.Checkpoint(**leaf.moments.trackables)
            for index, leaf in enumerate(self._leaves)
            if leaf.moments is not None
        }

    @property
    def size(self) -> int:
        """Number of network inputs per row, over all leaves."""
        return sum(leaf.size for leaf in self._leaves)

    @property
    def leaf_spaces(self) -> list[gymnasium.Space[Any]]:
        """Spaces of all leaves except the action mask, in the order of `tf.nest`."""
        return list(tf.nest.flatten(self._spaces))

    @property
    def input_space(self) -> gymnasium.Space[Any]:
        """Space of network inputs: float32 Boxes in the structure of observations."""
        boxes = [leaf.input_space for leaf in self._leaves]
        return _as_space(tf.nest.pack_sequence_as(self._spaces, boxes))

    def scales(self) -> list[tuple[tf.Tensor, ...]]:
        """Return `RunningMoments.scale` of each leaf; () if it is not normalised."""
        moments = [leaf.moments for leaf in self._leaves]
        return [() if part is None else part.scale for part in moments]

    def __call__(self, observation: Any, scales: Any = None) -> Any:
        """Preprocess an observation with rows `[N, ...]`.

        Args:
          observation: Raw observation of the envs.
          scales: Result of `scales`; the current statistics by default.

        Returns:
          Features: the same structure with leaves `[N, ...]`, float32 or, for images,
          uint8; an action mask becomes bool `[N, flags]`. Callers may select rows and
          set rows to zero before they pass features to `inputs`.
        """
        arrays = self._leaves_without_mask(observation)
        scales = [()] * len(arrays) if scales is None else scales
        features = list(map(_Leaf.preprocess, self._leaves, arrays, scales))
        packed = tf.nest.pack_sequence_as(self._spaces, features)
        if self._has_mask:
            # The mask is one array, or one array per choice.
            flags = tf.nest.flatten(observation[MASK_KEY])
            flags = [tf.cast(part, tf.bool) for part in flags]
            packed[MASK_KEY] = tf.concat(flags, axis=1)
        return packed

    def inputs(self, features: Any) -> tuple[Any, tf.Tensor | None]:
        """Return network inputs and the action mask, given features.

        Returns:
          The structure of observations with float32 leaves `[N, ...]`; and the mask,
          bool `[N, flags]`, or None if observations have no mask.
        """
        arrays = [
            tf.cast(array, tf.float32) / 255.0 if array.dtype == tf.uint8 else array
            for array in self._leaves_without_mask(features)
        ]
        mask = features[MASK_KEY] if self._has_mask else None
        return tf.nest.pack_sequence_as(self._spaces, arrays), mask

    def in_numpy(
        self, scales: Any, num_rows: int
    ) -> Callable[[Sequence[np.ndarray]], tuple[np.ndarray, np.ndarray | None]]:
        """Return `__call__` and `inputs` as one function of NumPy arrays.

        Args:
          scales: Result of `scales`.
          num_rows: Largest N.

        Returns:
          A function that maps the leaves of a raw observation, `[N, ...]` each, in
          the order of `tf.nest.flatten`, to flattened network inputs, float32
          `[N, size]`, and the action mask, bool `[N, flags]` or None.
        """
        indices = list(range(len(self._leaves)))
        mask_indices: list[int] = []
        if self._has_mask:
            nest = {**self._spaces, MASK_KEY: self._mask_space}
            leaves = tf.nest.flatten(nest)
            nest = tf.nest.pack_sequence_as(nest, range(len(leaves)))
            mask_indices = tf.nest.flatten(nest.pop(MASK_KEY))
            indices = tf.nest.flatten(nest)
        functions = [
            leaf.in_numpy(scale, num_rows)
            for leaf, scale in zip(self._leaves, scales, strict=True)
        ]
        parts = list(zip(indices, functions, strict=True))

        def inputs(leaves: Sequence[np.ndarray]) -> tuple[np.ndarray, Any]:
            columns = [
                function(leaves[index])
                .reshape(len(leaves[0]), -1)
                .astype(np.float32, copy=False)
                for index, function in parts
            ]
            rows = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            if not mask_indices:
                return rows, None
            flags = [leaves[index].astype(np.bool_) for index in mask_indices]
            return rows, np.concatenate(flags, axis=1)

        return inputs

    def statistics(self) -> dict[str, float]:
        """Return metrics: the ranges of the running means and standard deviations.

        A range is the minimum and maximum over all elements of all normalised leaves.
        """
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

    def update(
        self, observation: Any, mask: Any, learners: Learners = SINGLE_LEARNER
    ) -> None:
        """Update the statistics with the rows `[N, ...]` where `mask` `[N]` is true."""
        for leaf, array in zip(
            self._leaves, self._leaves_without_mask(observation), strict=True
        ):
            if leaf.moments is not None:
                leaf.moments.update(tf.convert_to_tensor(array), mask, learners)

    def _leaves_without_mask(self, observation: Any) -> list[Any]:
        """Return the leaves of an observation without the action mask."""
        if self._has_mask:
            observation = {k: v for k, v in observation.items() if k != MASK_KEY}
        return list(tf.nest.flatten(observation))


class _Leaf:
    """A leaf of the observation space, with its statistics if it is normalised."""

    def __init__(
        self, space: gymnasium.Space[Any], *, normalize: bool, clip: float
    ) -> None:
        self._space: Any = space
        self._kind = leaf_kind(space)
        self._clip = clip
        self.size = gymnasium.spaces.flatdim(space)
        self.moments: RunningMoments | None = None
        if normalize and self._kind == "box":
            self.moments = RunningMoments(tuple(space.shape or ()))

    @property
    def input_space(self) -> gymnasium.spaces.Box:
        has_space_shape = self._kind in ("box", "image", "multi_binary")
        shape = tuple(self._space.shape) if has_space_shape else (self.size,)
        low, high = 0.0, 1.0
        if self._kind == "box":
            high = self._clip if self.moments is not None else np.inf
            low = -high
        return gymnasium.spaces.Box(low, high, shape, np.float32)

    def preprocess(self, array: tf.Tensor, scale: tuple[tf.Tensor, ...]) -> tf.Tensor:
        if self.moments is not None:
            return self.moments.normalize(array, self._clip, scale)
        if self._kind == "image":
            return tf.cast(array, tf.uint8)  # a quarter of the memory of float32
        if self._kind == "discrete":
            zero_based = tf.cast(array, tf.int64) - int(self._space.start)
            return tf.one_hot(zero_based, int(self._space.n))
        if self._kind == "multi_discrete":
            sizes = np.ravel(self._space.nvec)
            start = np.asarray(self._space.start, np.int64)
            columns = tf.reshape(tf.cast(array, tf.int64) - start, [-1, len(sizes)])
            codes = [tf.one_hot(columns[:, i], int(n)) for i, n in enumerate(sizes)]
            return tf.concat(codes, axis=1)
        return tf.cast(array, tf.float32)

    def in_numpy(
        self, scale: tuple[tf.Tensor, ...], num_rows: int
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that maps raw rows to network inputs of any dtype."""
        if self.moments is not None:
            return self.moments.in_numpy(self._clip, scale, num_rows)
        if self._kind == "image":
            return lambda rows: rows / np.float32(255)
        if self._kind == "discrete":
            choices = int(self._space.start) + np.arange(int(self._space.n))
            return lambda rows: rows[:, None] == choices
        if self._kind == "multi_discrete":
            sizes, start = np.ravel(self._space.nvec), np.ravel(self._space.start)
            columns = np.repeat(np.arange(len(sizes)), sizes)
            choices = np.concatenate(
                [first + np.arange(n) for first, n in zip(start, sizes, strict=True)]
            )
            return lambda rows: rows.reshape(len(rows), -1)[:, columns] == choices
        return lambda rows: rows


def _as_space(nest: Any) -> gymnasium.Space[Any]:
    """Turn dicts and tuples of spaces into Dict and Tuple spaces."""
    if isinstance(nest, dict):
        return gymnasium.spaces.Dict({k: _as_space(part) for k, part in nest.items()})
    if isinstance(nest, tuple):
        return gymnasium.spaces.Tuple([_as_space(part) for part in nest])
    return nest
