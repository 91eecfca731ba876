"""Build, step, reset and rebuild the env of one row.

Exceptions of the env propagate unchanged. A value outside the spaces raises
`SpaceViolation`. The block handles these exceptions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import gymnasium
import numpy as np

from envserve.crashes.action_ring import RowRecord
from envserve.envs.context import EnvContext
from envserve.envs.registry import Env, make_env
from envserve.envs.seeding import env_seed
from envserve.errors import SpaceError
from envserve.settings import EnvRequest
from envserve.slab import BEAT_INCREMENT, FIRST_STEP, Rows, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import copy_info
from envserve.spaces.leaves import Array, is_finite
from envserve.worker import step_timings
from envserve.worker.env_checks import (
    EnvChecks,
    SpaceViolation,
    check_rebuilt,
    convert_flag,
    convert_leaf,
    convert_reward,
    flatten_observation,
    leaf_label,
    split_reset_result,
    step_result_violation,
)
from envserve.worker.rendering import prepare_rendering, render
from envserve.worker.reset_signature import complete_reset_signature

#: Result of a step without the observation: reward, terminated, truncated and info.
StepOutcome = tuple[float, bool, bool, Mapping[str, Any]]
#: Encoded options of a plain reset. `make_vec` sends an empty dict if the only option
#: is "reset_mask".
NO_OPTIONS: Final = (b"", codec.encode({}, keep_types=True))


class EnvRow:
    """An env that writes its results to a row of the slab.

    Attributes:
      request: Settings of the env.
      row: Row of the pool.
      env_index: Row in the whole batch, which determines the seeds.
      incarnation: Number of times the env was rebuilt, in this and earlier processes.
        Each incarnation has a different default seed.
      record: The row's record in the action ring, after `attach`.
      spec: Spaces of the env, after `build`.
      inner_env: The env without its wrappers, after `build`.
      is_fresh: Whether the env has not been reset since it was built.
      attributes: Attributes that clients have set, to be restored in a rebuilt env.
      autoreset: See `settings.Autoreset`.
    """

    def __init__(
        self,
        request: EnvRequest,
        row: int,
        incarnation: int = 0,
        checks: EnvChecks | None = None,
        context: EnvContext | None = None,
        env_fn: Callable[[], Env] | None = None,
    ) -> None:
        """Store the arguments; `build` builds the env.

        By default, the env is created by its name, and its context is that of a pool
        with one worker.
        """
        self.row = row
        self.env_index = request.first_env_index + row
        self.incarnation = incarnation
        self.request = request
        self.autoreset = request.autoreset
        self._checks = checks or EnvChecks()
        self._context = context or request.context_of(row)
        self._kwargs = request.kwargs_of(row)
        self._env_fn = env_fn
        self._initial_seed: int | None = None
        self._last_seed: int | None = None
        self._beat = 0
        self._needs_reset = False
        self.attributes: dict[str, Any] = {}

    @property
    def default_seed(self) -> int:
        """Default seed of the first reset after the env was built."""
        return env_seed(self.request.seed, self.env_index, self.incarnation)

    def drop_initial_seed(self) -> None:
        """Discard the default seed that the first reset would use."""
        self._initial_seed = None

    def build(self) -> EnvSpec:
        """Build the env and return its spec; the first reset uses the default seed."""
        request = self.request
        kwargs = self._context.arguments(self._kwargs)
        prepare_rendering(kwargs)
        arguments = request.env_name, kwargs, request.wrappers, self._env_fn
        env = self._context.run(lambda: make_env(*arguments))
        complete_reset_signature(env, needs_seed=request.seeded)
        self.step = self._first_step  # type: ignore[method-assign]  # first call only
        self._env = env
        self.inner_env = getattr(self._env, "unwrapped", self._env)
        self.is_fresh = True
        self._initial_seed = self.default_seed if request.seeded else None
        try:
            spaces = self._env.observation_space, self._env.action_space
        except AttributeError as error:
            if error.name not in ("observation_space", "action_space"):
                raise
            raise SpaceError(
                f"expected an env with the attribute {error.name}; "
                f"{type(error.obj).__name__} has none; set it to a space of Gymnasium"
            ) from None
        spec = self.spec = EnvSpec(request.env_name, *spaces)
        self._space = spec.observation_space
        # Both raise a SpaceError if the space is not supported.
        self._leaves, _ = spec.observation_leaves, spec.action_leaves
        self._single_leaf = leaf = spec.single_observation
        self._single_dtype = None if leaf is None else leaf.dtype
        self._single_shape = None if leaf is None else leaf.shape
        return spec

    def rebuild(self) -> None:
        """Close the env, build its next incarnation, and restore `attributes`.

        Raises:
          EnvStartError: The new env has different spaces.
        """
        self.close()
        gc.collect()  # free the memory of earlier envs with reference cycles
        self.incarnation += 1
        first = self.spec
        check_rebuilt(self.env_index, first, self.build(), self.request)
        for name, value in self.attributes.items():
            self._set_attribute(name, copy.deepcopy(value))

    def attach(self, rows: Rows, heartbeat: memoryview, record: RowRecord) -> None:
        """Set the arrays, the worker's heartbeat and the row's record to write to."""
        self._observation = rows.observation
        self._final_observation = rows.final_observation
        if self._single_leaf is not None:
            self._single_row = rows.observation[0][self.row, ...]
        self._heartbeat = heartbeat
        self._beat = next_beat(self._beat, self.row)
        self.record = record

    def _first_step(self, action: Any) -> StepOutcome:
        """Step a new env.

        `FIRST_STEP` extends the timeout of this step, because the env may compile code.
        A step that only resets the env does not count; see `defer_reset`.
        """
        if not self._needs_reset:
            self._heartbeat[1] = FIRST_STEP
            del self.step
        outcome = EnvRow.step(self, action)
        self._heartbeat[1] = 0
        return outcome

    def step(self, action: Any) -> StepOutcome:
        """Step the env and write its observation.

        At the end of an episode, this method also checks that the observation and the
        reward are finite. After all other steps, the block checks all rows at once,
        which is much cheaper.
        """
        self._beat = beat = self._beat + BEAT_INCREMENT
        self._heartbeat[0] = beat
        if self._needs_reset and self.autoreset == "next_step":
            return 0.0, False, False, self._begin_episode(is_autoreset=True)
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
            is_over = terminated or truncated
        except (TypeError, ValueError) as error:
            violation = step_result_violation(error)
            if violation is None:
                raise
            raise violation from None
        if type(info) is not dict and not isinstance(info, Mapping):
            raise SpaceViolation(
                f"expected info to be a dict; got {type(info).__name__}; fix the env"
            )
        if type(reward) is not float:
            try:
                reward = float(reward)
            except (TypeError, ValueError, OverflowError):
                reward = convert_reward(reward)
        if is_over:
            terminated = convert_flag("terminated", terminated)
            truncated = convert_flag("truncated", truncated)
            if terminated or truncated:  # `is_over` is also true for [False]
                episode_info = self._end_episode(observation, reward, info)
                return reward, terminated, truncated, episode_info
        # Fast path of `_write` for a space with a single array.
        if (
            type(observation) is np.ndarray
            and observation.dtype is self._single_dtype
            and observation.shape == self._single_shape
        ):
            self._single_row[...] = observation
        else:
            self._write(self._observation, observation)
        return reward, False, False, info

    def _end_episode(
        self, observation: Any, reward: float, info: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write the last observation of an episode, and return the info.

        With autoreset "same_step", also reset the env.
        """
        self._write(self._final_observation, observation)
        # Check the observation before the next episode begins, while the action record
        # still describes this episode.
        self.check_finite(reward, self._final_observation)
        if self.autoreset != "same_step":
            self._needs_reset = True
            self._write(self._observation, observation)
            return info
        return add_reset_info(copy_info(info), self._begin_episode(is_autoreset=True))

    def reset(self, seed: int | None, options: bytes = b"") -> Mapping[str, Any]:
        """Reset the env, write its first observation, and return the info.

        Args:
          seed: Seed of the reset. If it is None, the first reset after the env was
            built uses the default seed, if any, and later resets use no seed.
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
            seed = self._initial_seed
        self._initial_seed = None
        self.is_fresh = self._needs_reset = False
        self.record.begin_episode(
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
        self._beat = beat = self._beat + BEAT_INCREMENT
        heartbeat[0] = beat
        heartbeat[1] = 1
        # Decode the options for each env, because an env may change its dict.
        env_options = codec.decode(options) if options else None
        began_at = step_timings.start_time()
        result = self._env.reset(seed=seed, options=env_options)
        step_timings.record_resets(heartbeat, began_at, 1)
        observation, info = split_reset_result(result)
        self._write(self._observation, observation)
        heartbeat[1] = 0
        return info

    def call(
        self,
        kind: str,
        name: str,
        arguments: list[Any],
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Call, get or set an attribute of the env or a wrapper; see `lane.Call`."""
        if kind == "set":
            value = copy.deepcopy(arguments[0])
            self._set_attribute(name, arguments[0])
            self.attributes[name] = value
            return None
        if name == "wrapper_names":
            return _wrapper_names(self._env)
        get = getattr(
            self._env, "get_wrapper_attr", functools.partial(getattr, self._env)
        )
        value = get(name)
        if kind == "call" and (callable(value) or arguments or keywords):
            return value(*arguments, **keywords)
        return value

    def defer_reset(self) -> None:
        """Defer the reset to the next step, as autoreset mode "next_step" requires."""
        self._needs_reset = True

    def _set_attribute(self, name: str, value: Any) -> None:
        # An env that does not derive from `gymnasium.Env` may lack `set_wrapper_attr`.
        env = self._env
        getattr(env, "set_wrapper_attr", functools.partial(setattr, env))(name, value)

    def render(self) -> Any:
        """Return the rendered frame; see `rendering.render`."""
        return render(self._env)

    def intercept_calls(self, call: Callable[..., Any]) -> None:
        """Run the inner `reset` and `step` as `call(method, ...)`, for a debugger."""
        for name in ("reset", "step"):
            method = getattr(self.inner_env, name)
            setattr(self.inner_env, name, functools.partial(call, method))

    def close(self) -> None:
        """Close the env if it was built; suppress its exceptions."""
        with contextlib.suppress(BaseException):  # some windows call `sys.exit`
            self._env.close()

    def check_finite(
        self, reward: float = 0.0, observation: tuple[Array, ...] = ()
    ) -> None:
        """Raise SpaceViolation for NaN or infinity in the reward or observation.

        Args:
          reward: A reward of the env.
          observation: Arrays of all rows, in which `row` is checked; by default, the
            current observations.
        """
        check = self._checks.check_finite
        if not math.isfinite(reward):
            check("a finite reward", reward)
        for leaf, array in zip(
            self._leaves, observation or self._observation, strict=True
        ):
            value = array[self.row]
            if not is_finite(value):
                check(f"{leaf_label(leaf)} to be finite", value)

    def _write(self, target: tuple[Array, ...], observation: Any) -> None:
        leaf = self._single_leaf
        if (
            leaf is not None
            and type(observation) is np.ndarray
            and observation.shape == leaf.shape
            and observation.dtype == leaf.dtype
        ):
            target[0][self.row] = observation
            return
        values = flatten_observation(self._space, observation)
        for leaf, array, value in zip(self._leaves, target, values, strict=True):
            env_class = type(self.inner_env)
            array[self.row] = convert_leaf(leaf, value, self._checks, env_class)


def add_reset_info(
    info: Mapping[str, Any], reset_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the info of an ended episode, with the info of the reset that followed.

    If the env has set the key itself, its value is replaced, because clients expect the
    info of the reset.
    """
    if reset_info or "reset_info" in info:
        return {**info, "reset_info": reset_info}
    return info


def _wrapper_names(env: Env) -> list[str]:
    """Return the class names of an env's wrappers and of their base classes, sorted."""
    names: set[str] = set()
    while isinstance(env, gymnasium.Wrapper):
        names.update(cls.__name__ for cls in type(env).__mro__)
        env = env.env
    return sorted(names)
