"""Envs for Stable-Baselines3: its VecEnv, here or on servers.

Importing this module imports Stable-Baselines3, which nothing else here does. A lost
episode is a truncated one there, since it has no masks for rows; padding is waited out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

from envserve.client import BatchEnv
from envserve.client.make_vec import make_batch, send_step
from envserve.client.step_result import last_rows
from envserve.client.vector_env import metadata_of
from envserve.errors import CallError, EnvError
from envserve.wrappers.specs import parse_wrappers

try:
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'envserve[sb3]'") from error

__all__ = ["BatchVecEnv", "make_vec_env"]

Array = np.ndarray[Any, Any]


def make_vec_env(
    env: Any,
    n_envs: int = 1,
    addresses: Sequence[str] | None = None,
    seed: int | None = None,
    *,
    monitor_file: str | None = None,
    **options: Any,
) -> VecMonitor:
    """Makes envs as Stable-Baselines3 takes them, seeded as by its own function.

    Args:
      env: As for `envserve.make_vec`, and so are `addresses`.
      n_envs: Number of rows.
      addresses: Servers, like "tcp://sim1:5555"; by default worker processes here.
      seed: Env i's first reset gets `seed + i`; None draws one.
      monitor_file: Where to write return, length and time of each episode, as CSV.
      **options: Like `num_workers`, `env_kwargs` and `wrappers`.

    Raises:
      EnvserveError: As for `envserve.make_vec`.
    """
    fixed = {"autoreset": "same_step"}
    batch = make_batch(env, n_envs, addresses, fixed, seed=seed, **options)
    kwargs, wrappers = options.get("env_kwargs") or {}, options.get("wrappers", ())
    names = [wrapper.name for wrapper in parse_wrappers(wrappers)]
    vec_env = BatchVecEnv(batch, kwargs.get("render_mode"), names)
    vec_env.seed(seed)
    monitored = VecMonitor(vec_env, monitor_file)
    monitored.reset_infos = vec_env.reset_infos  # else its own, which nobody fills
    return monitored


class BatchVecEnv(VecEnv):
    """A batch of envs as a VecEnv, which owns it.

    Attributes:
      batch: The batch, of autoreset "same_step".
    """

    def __init__(
        self, batch: BatchEnv, render_mode: str | None, wrapper_names: Sequence[str]
    ) -> None:
        self.batch = batch
        spec = gymnasium.registry.get(batch.spec.env_name)
        spaces = {n: getattr(batch, n) for n in ("observation_space", "action_space")}
        self._known = {"render_mode": render_mode, "spec": spec, **spaces}  # unasked
        self._wrapper_names = frozenset(wrapper_names)
        self._observations = batch_space(batch.observation_space, batch.num_envs)
        super().__init__(batch.num_envs, batch.observation_space, batch.action_space)
        self.metadata |= metadata_of(batch)

    def reset(self) -> Any:
        """Resets all envs; seeds and options that were set hold for this once."""
        if self.batch.num_in_flight:
            self.batch.drain()
        if any(options != self._options[0] for options in self._options):
            raise ValueError("options: expected the same for all envs; got others")
        options = self._options[0] or None  # envs need not take any
        observation = self.batch.reset(seeds=self._seeds, options=options)
        infos = self.batch.reset_infos
        self.reset_infos[:] = [dict(infos.get(i, {})) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        self._seen = observation
        return observation

    def step_async(self, actions: Array) -> None:
        """Starts a step of all envs, actions `[n_envs, ...]`; drops one that runs."""
        if self.batch.num_in_flight:  # such as after Ctrl-C
            self.batch.cancel_step()
        send_step(self.batch, actions)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Returns observations, rewards float32 `[n_envs]`, dones and infos."""
        try:
            _, step = self.batch.recv(self.num_envs)
        except EnvError:  # the first error of a step is the one to tell
            self.batch.drain()
            raise
        except KeyboardInterrupt:
            self.batch.cancel_step()
            raise
        dones = step.terminated | step.truncated
        infos = [
            {**step.infos.get(row, {}), "TimeLimit.truncated": is_cut}
            for row, is_cut in enumerate((step.truncated & ~step.terminated).tolist())
        ]
        if dones.any():
            last = last_rows(self._observations, step, self._seen)
            for row in dones.nonzero()[0].tolist():
                infos[row]["terminal_observation"] = copy.deepcopy(last[row])
                begun = infos[row].pop("reset_info", None)
                self.reset_infos[row] = begun if isinstance(begun, dict) else {}
        self._seen = step.observation
        return step.observation, step.reward.astype(np.float32), dones, infos

    def close(self) -> None:
        """Ends all envs."""
        self.batch.close()

    def get_images(self) -> list[Any]:
        """Returns what each env renders."""
        return self.env_method("render")

    def has_attr(self, attr_name: str) -> bool:
        """Tells whether all envs have it; servers must expose `has_wrapper_attr`."""
        return all(self.env_method("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns it of each of these envs; raises AttributeError if one has none."""
        rows = self._get_indices(indices)
        if attr_name in self._known:
            return [self._known[attr_name] for _ in rows]
        try:
            return self.batch.get_attr(attr_name, rows)
        except CallError as error:
            raise AttributeError(str(error)) from error

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets it in each of these envs."""
        rows = self._get_indices(indices)
        self.batch.set_attr(attr_name, [value for _ in rows], rows)

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method of each of these envs."""
        rows = self._get_indices(indices)
        # Of infos, as HerReplayBuffer gives them; they have no plain form as an array.
        plain = [x.tolist() if getattr(x, "dtype", 0) == "O" else x for x in args]
        try:
            return self.batch.call_each(method_name, *plain, env_indices=rows, **kwargs)
        except CallError as error:
            if f" {method_name}: AttributeError: " in str(error):
                raise AttributeError(str(error)) from error
            raise

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Tells of wrappers that were asked for by name; says no of all others."""
        is_wrapped = wrapper_class.__name__ in self._wrapper_names
        return [is_wrapped for _ in self._get_indices(indices)]
