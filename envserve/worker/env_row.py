"""One env in its row: built, stepped, reset, rebuilt; observations checked as written.

Whatever the env raises comes out of these methods as it is, and a value that its
spaces do not allow as `SpaceViolation`. What to do then is the worker's to say.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envserve.crashes.action_ring import RowRecord
from envserve.errors import SpaceError
from envserve.registry import make_env
from envserve.seeding import env_seed
from envserve.slab import BEAT, Rows, next_beat
from envserve.spec import EnvSpec, Leaf, flatten
from envserve.wrappers import WrapperSpec

__all__ = ["EnvRow", "SpaceViolation"]

Array = np.ndarray[Any, Any]


class SpaceViolation(Exception):
    """The env returned what its own spaces do not allow."""


class EnvRow:
    """An env and the row of the slab that it writes.

    Attributes:
      row: Row of the pool.
      env_index: Row of the whole batch, from which the seeds follow.
      incarnation: How often the env has been rebuilt, over all its processes.
      record: What the row has been through, once attached.
      inner_env: The env without its wrappers, once built.
    """

    def __init__(
        self,
        *,
        row: int,
        env_index: int,
        incarnation: int,
        name: str,
        kwargs: Mapping[str, Any],
        root_seed: int,
        wrappers: Sequence[WrapperSpec] = (),
    ) -> None:
        """Only stores; `build` makes the env."""
        self.row = row
        self.env_index = env_index
        self.incarnation = incarnation
        self._name = name
        self._kwargs = dict(kwargs)
        self._wrappers = tuple(wrappers)
        self._root_seed = root_seed
        self._fresh_seed: int | None = None
        self._last_seed: int | None = None
        self._beat = 0
        self._needs_reset = False
        self._is_built = False

    @property
    def seed(self) -> int:
        """Seed of this incarnation."""
        return env_seed(self._root_seed, self.env_index, self.incarnation)

    @property
    def is_fresh(self) -> bool:
        """Whether this incarnation has not been reset yet."""
        return self._fresh_seed is not None

    def build(self) -> EnvSpec:
        """Makes the env; its first reset will use the incarnation's seed."""
        self._env = make_env(self._name, self._kwargs, self._wrappers)
        self._step_env = self._env.step
        self.inner_env = self._env.unwrapped
        self._is_built = True
        self._fresh_seed = self.seed
        spec = EnvSpec(self._name, self._env.observation_space, self._env.action_space)
        self._space = spec.observation_space
        self._leaves = spec.observation_leaves
        first = self._leaves[0]
        self._only_leaf = first if first.space is self._space else None
        self._only_dtype = None if self._only_leaf is None else first.dtype
        self._only_shape = first.shape
        return spec

    def rebuild(self) -> None:
        """Replaces an env that failed by its next incarnation."""
        self.close()
        self.incarnation += 1
        self.build()

    def attach(
        self,
        rows: Rows,
        heartbeat: memoryview,
        record: RowRecord,
        autoreset: str = "same_step",
    ) -> None:
        """Sets where to write.

        Args:
          rows: Rows of the pool.
          heartbeat: What shows that it goes on, and whose env is at work; see `Slab`.
          record: Where to note what it goes through.
          autoreset: See `settings.Autoreset`.
        """
        self._observation = rows.observation
        self._final_observation = rows.final_observation
        self._only_row = rows.observation[0][self.row, ...]
        self._heartbeat = heartbeat
        self._beat = next_beat(self._beat, self.row)
        self.record = record
        self._is_same_step = autoreset == "same_step"
        self._is_next_step = autoreset == "next_step"

    def step(self, action: Any) -> tuple[float, bool, bool, Mapping[str, Any]]:
        """Steps the env and writes its observation.

        Whether that is finite is looked at only at an episode's end: it is much cheaper
        for many rows at once.

        Returns:
          Reward, terminated, truncated, and the info of this step.
        """
        self._beat = beat = self._beat + BEAT
        self._heartbeat[0] = beat
        if self._needs_reset and self._is_next_step:
            return 0.0, False, False, self._begin_episode(None, is_autoreset=True)
        observation, reward, terminated, truncated, info = self._step_env(action)
        if type(info) is not dict and not isinstance(info, Mapping):
            raise SpaceViolation(
                f"expected info to be a dict; got {type(info).__name__}; mend the env"
            )
        if type(reward) is not float:
            reward = float(reward)
        if terminated or truncated:
            episode_info = self._end_episode(observation, reward, info)
            return reward, bool(terminated), bool(truncated), episode_info
        # The usual case of `_write`, without a call.
        if (
            type(observation) is np.ndarray
            and observation.dtype is self._only_dtype
            and observation.shape == self._only_shape
        ):
            self._only_row[...] = observation
        else:
            self._write(self._observation, observation)
        return reward, False, False, info

    def _end_episode(
        self, observation: Any, reward: float, info: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Writes the last observation and the next first one; returns the info."""
        self._write(self._final_observation, observation)
        # Looked at before the next episode begins: the record is still of this one.
        self._check_finite(reward, self._final_observation)
        if not self._is_same_step:
            self._needs_reset = True
            self._write(self._observation, observation)
            return info
        reset_info = self._begin_episode(None, is_autoreset=True)
        return {**info, "reset_info": reset_info} if reset_info else info

    def reset(self, seed: int | None) -> Mapping[str, Any]:
        """Resets the env, writes its first observation, and returns the info."""
        info = self._begin_episode(seed, is_autoreset=False)
        self.check_finite()
        return info

    def _begin_episode(
        self, seed: int | None, *, is_autoreset: bool
    ) -> Mapping[str, Any]:
        if seed is None:
            seed = self._fresh_seed
        self._fresh_seed = None
        self._needs_reset = False
        if not (is_autoreset and self.record.begin_as_before()):
            self.record.begin(
                self.inner_env,
                self.incarnation,
                seed,
                self._last_seed,
                is_autoreset=is_autoreset,
            )
        if seed is not None:
            self._last_seed = seed
        heartbeat = self._heartbeat
        self._beat = beat = self._beat + BEAT
        heartbeat[0] = beat
        heartbeat[1] = 1
        observation, info = self._env.reset(seed=seed)
        self._write(self._observation, observation)
        heartbeat[1] = 0
        return info

    def call(self, kind: str, name: str, arguments: list[Any]) -> Any:
        """Calls a method, or gets or sets an attribute, of the env or a wrapper."""
        if kind == "set":
            self._env.set_wrapper_attr(name, arguments[0])
            return None
        value = self._env.get_wrapper_attr(name)
        if kind == "call" and (callable(value) or arguments):
            return value(*arguments)
        return value

    def close(self) -> None:
        """Closes the env, if there is one; what it raises then is of no use."""
        if self._is_built:
            self._is_built = False
            with contextlib.suppress(Exception):
                self._env.close()

    def check_finite(self, reward: float = 0.0) -> None:
        """Raises SpaceViolation for NaN or infinity in a reward, or the observation."""
        self._check_finite(reward, self._observation)

    def _check_finite(self, reward: float, target: tuple[Array, ...]) -> None:
        if not math.isfinite(reward):
            raise SpaceViolation(f"expected a finite reward; got {reward}")
        for leaf, array in zip(self._leaves, target, strict=True):
            if leaf.dtype.kind == "f":
                value = array[self.row]
                finite = np.isfinite(value)
                if not finite.all():
                    odd = value[~finite].flat[0] if value.ndim else value
                    raise SpaceViolation(
                        f"expected {_label(leaf)} to be finite; got {odd}; "
                        "mend the env, or end the episode before it diverges"
                    )

    def _write(self, target: tuple[Array, ...], observation: Any) -> None:
        leaf = self._only_leaf
        if (
            leaf is not None
            and type(observation) is np.ndarray
            and observation.shape == leaf.shape
            and observation.dtype == leaf.dtype
        ):
            target[0][self.row] = observation
            return
        try:
            values = flatten(self._space, observation)
        except SpaceError as error:
            raise SpaceViolation(f"observation: {error}") from None
        for leaf, array, value in zip(self._leaves, target, values, strict=True):
            array[self.row] = _checked(leaf, value)


def _checked(leaf: Leaf, value: Any) -> Array:
    array = np.asarray(value)
    is_array = isinstance(value, np.ndarray)
    right_dtype = (
        array.dtype == leaf.dtype
        if is_array and array.ndim
        else np.can_cast(array.dtype, leaf.dtype, "same_kind")
        or (array.dtype.kind in "iu" and leaf.dtype.kind in "iu")
    )
    if array.shape != leaf.shape or not right_dtype:
        sizes = ", ".join(str(size) for size in array.shape)
        raise SpaceViolation(
            f"expected {_label(leaf)} {leaf}; got {array.dtype}[{sizes}]; "
            f"cast it in the env, or declare that in its observation space"
        )
    return array


def _label(leaf: Leaf) -> str:
    return f"observation {leaf.path!r}" if leaf.path else "observation"
