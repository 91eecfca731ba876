"""One env in its row: built, stepped, reset, rebuilt; observations checked as written.

Whatever the env raises comes out of these methods as it is, and a value that its
spaces do not allow as `SpaceViolation`. What to do then is the worker's to say.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from envserve.crashes.action_ring import RowRecord
from envserve.envs.registry import make_env
from envserve.envs.seeding import env_seed
from envserve.settings import EnvRequest
from envserve.slab import BEAT, Rows, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import snapshot
from envserve.worker import step_timings
from envserve.worker.env_checks import (
    EnvChecks,
    SpaceViolation,
    flag_of,
    label_of,
    leaf_array,
    leaf_values,
    reset_values,
    reward_of,
    violation_of,
)
from envserve.worker.rendering import render
from envserve.worker.reset_signature import complete

__all__ = ["EnvRow"]

Array = np.ndarray[Any, Any]


class EnvRow:
    """An env and the row of the slab that it writes.

    Attributes:
      request: How the env is built.
      row: Row of the pool.
      env_index: Row of the whole batch, from which the seeds follow.
      incarnation: How often the env has been rebuilt, over all its processes.
      record: What the row has been through, once attached.
      inner_env: The env without its wrappers, once built.
      is_fresh: Whether this incarnation has not been reset yet.
      attributes: Those that have been set, which the next incarnation gets too.
      autoreset: See `settings.Autoreset`.
    """

    def __init__(
        self,
        request: EnvRequest,
        row: int,
        incarnation: int = 0,
        checks: EnvChecks | None = None,
    ) -> None:
        """Store the arguments; `build` makes the env."""
        self.row = row
        self.env_index = request.first_env_index + row
        self.incarnation = incarnation
        self.request = request
        self.autoreset = request.autoreset
        self.is_fresh = True
        self._checks = checks or EnvChecks()
        self._fresh_seed: int | None = None
        self._last_seed: int | None = None
        self._beat = 0
        self._needs_reset = False
        self.attributes: dict[str, Any] = {}

    @property
    def seed(self) -> int:
        """Seed of this incarnation."""
        return env_seed(self.request.seed, self.env_index, self.incarnation)

    def forget_seed(self) -> None:
        """Has the first reset get no seed, unless one is given."""
        self._fresh_seed = None

    def build(self) -> EnvSpec:
        """Makes the env; its first reset will use the incarnation's seed, if any."""
        request = self.request
        env = make_env(request.env_name, request.env_kwargs, request.wrappers)
        self._env = complete(env, needs_seed=request.seeded)
        self._step_env = self._env.step
        self.inner_env = self._env.unwrapped
        self.is_fresh = True
        self._fresh_seed = self.seed if request.seeded else None
        own_spaces = self._env.observation_space, self._env.action_space
        spec = EnvSpec(request.env_name, *own_spaces)
        self._space = spec.observation_space
        self._leaves = spec.observation_leaves
        self._only_leaf = self._only_dtype = self._only_shape = None
        for leaf in self._leaves:
            if leaf.space is self._space and not leaf.is_encoded:
                self._only_leaf, self._only_dtype = leaf, leaf.dtype
                self._only_shape = leaf.shape
        return spec

    def rebuild(self) -> None:
        """Replaces an env that failed by its next incarnation, its attributes set."""
        self.close()
        self.incarnation += 1
        self.build()
        for name, value in self.attributes.items():
            self._env.set_wrapper_attr(name, copy.deepcopy(value))

    def attach(self, rows: Rows, heartbeat: memoryview, record: RowRecord) -> None:
        """Sets where to write.

        Args:
          rows: Rows of the pool.
          heartbeat: What shows that it goes on, and whose env is at work; see `Slab`.
          record: Where to note what it goes through.
        """
        self._observation = rows.observation
        self._final_observation = rows.final_observation
        if self._only_leaf is not None:
            self._only_row = rows.observation[0][self.row, ...]
        self._heartbeat = heartbeat
        self._beat = next_beat(self._beat, self.row)
        self.record = record

    def step(self, action: Any) -> tuple[float, bool, bool, Mapping[str, Any]]:
        """Steps the env and writes its observation.

        Whether that is finite is looked at only at an episode's end: it is much cheaper
        for many rows at once.

        Returns:
          Reward, terminated, truncated, and the info of this step.
        """
        self._beat = beat = self._beat + BEAT
        self._heartbeat[0] = beat
        if self._needs_reset and self.autoreset == "next_step":
            return 0.0, False, False, self._begin_episode(is_autoreset=True)
        try:
            observation, reward, terminated, truncated, info = self._step_env(action)
            is_over = terminated or truncated
        except (TypeError, ValueError) as error:
            violation = violation_of(error)
            if violation is None:
                raise
            raise violation from None
        if type(info) is not dict and not isinstance(info, Mapping):
            raise SpaceViolation(
                f"expected info to be a dict; got {type(info).__name__}; mend the env"
            )
        if type(reward) is not float:
            try:
                reward = float(reward)
            except (TypeError, ValueError):
                reward = reward_of(reward)
        if is_over:
            terminated = flag_of("terminated", terminated)
            truncated = flag_of("truncated", truncated)
            episode_info = self._end_episode(observation, reward, info)
            return reward, terminated, truncated, episode_info
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
        self.check_finite(reward, self._final_observation)
        if self.autoreset != "same_step":
            self._needs_reset = True
            self._write(self._observation, observation)
            return info
        info = snapshot(info)
        reset_info = self._begin_episode(is_autoreset=True)
        if reset_info or "reset_info" in info:  # none of the env's own
            return {**info, "reset_info": reset_info}
        return info

    def reset(self, seed: int | None, options: bytes = b"") -> Mapping[str, Any]:
        """Resets the env, writes its first observation, and returns the info.

        Args:
          seed: What it gets; None for the seed of this incarnation, while it is fresh.
          options: See `lane.Reset`.
        """
        info = self._begin_episode(seed, options)
        self.check_finite()
        return info

    def _begin_episode(
        self,
        seed: int | None = None,
        options: bytes = b"",
        *,
        is_autoreset: bool = False,
    ) -> Mapping[str, Any]:
        if seed is None:
            seed = self._fresh_seed
        self._fresh_seed = None
        self.is_fresh = self._needs_reset = False
        if not (is_autoreset and self.record.begin_as_before()):
            self.record.begin(
                self.inner_env,
                self.incarnation,
                seed,
                self._last_seed,
                options,
                is_autoreset=is_autoreset,
            )
        if seed is not None:
            self._last_seed = seed
        heartbeat = self._heartbeat
        self._beat = beat = self._beat + BEAT
        heartbeat[0] = beat
        heartbeat[1] = 1
        own = codec.decode(options) if options else None  # no two envs share them
        began_at = step_timings.begin()
        result = self._env.reset(seed=seed, options=own)
        step_timings.note_resets(heartbeat, began_at, 1)
        observation, info = reset_values(result)
        self._write(self._observation, observation)
        heartbeat[1] = 0
        return info

    def call(
        self,
        kind: str,
        name: str,
        arguments: list[Any],
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Calls a method, or gets or sets an attribute, of the env or a wrapper."""
        if kind == "set":
            value = copy.deepcopy(arguments[0])
            self._env.set_wrapper_attr(name, arguments[0])
            self.attributes[name] = value
            return None
        value = self._env.get_wrapper_attr(name)
        if kind == "call" and (callable(value) or arguments or named):
            return value(*arguments, **named)
        return value

    def render(self) -> Any:
        """Return what the env renders; see `rendering.render`."""
        return render(self._env)

    def step_by(self, call: Callable[..., Any]) -> None:
        """Has the env's own methods called by another: a debugger."""
        for name in ("reset", "step"):
            own = getattr(self.inner_env, name)
            setattr(self.inner_env, name, functools.partial(call, own))
        self._step_env = self._env.step

    def close(self) -> None:
        """Close the env, if it was built, even if it raises."""
        with contextlib.suppress(Exception):
            self._env.close()

    def check_finite(
        self, reward: float = 0.0, observation: tuple[Array, ...] = ()
    ) -> None:
        """Raise SpaceViolation for NaN or infinity in a reward, or the observation."""
        check = self._checks.check_finite
        if not math.isfinite(reward):
            check("a finite reward", reward)
        for leaf, array in zip(
            self._leaves, observation or self._observation, strict=True
        ):
            check(f"{label_of(leaf)} to be finite", array[self.row])

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
        values = leaf_values(self._space, observation)
        for leaf, array, value in zip(self._leaves, target, values, strict=True):
            env_class = type(self.inner_env)
            array[self.row] = leaf_array(leaf, value, self._checks, env_class)
