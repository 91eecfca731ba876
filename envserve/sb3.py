"""A `VecEnv` for Stable-Baselines3, with envs in worker processes or on servers.

Stable-Baselines3 cannot mask invalid rows, so an episode that a fault ends is returned
as a truncated one, and steps wait for absent envs instead of returning padding. Only
this module imports Stable-Baselines3.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from envserve.client import BatchEnv
from envserve.client.make_vec import make_batch
from envserve.client.step_result import final_observations
from envserve.client.vector_env import metadata_of, specs_of
from envserve.errors import CallError, EnvError
from envserve.slab import Array
from envserve.text import install_command
from envserve.wire.bodies import pack_options

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; {install_command('sb3')}") from error

__all__ = ["BatchVecEnv", "make_vec_env"]


def make_vec_env(
    env: Any,
    n_envs: int | None = None,
    addresses: Sequence[str] | None = None,
    seed: int | None = None,
    *,
    monitor_file: str | None = None,
    monitor_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> VecEnv:
    """Make a VecEnv, like `stable_baselines3.common.env_util.make_vec_env`.

    The VecEnv is a `VecMonitor`, unless the envs have a `Monitor` and neither
    `monitor_file` nor `monitor_kwargs` is given.

    Args:
      env: See `envserve.make_vec`.
      n_envs: Number of envs; 1 by default, or the number of functions in a list.
      addresses: Server addresses, like "tcp://sim1:5555"; by default, the envs run in
        worker processes on this host.
      seed: The first reset of env i uses `seed + i`, and the action space uses `seed`;
        a random seed by default.
      monitor_file: CSV file for the return, length and time of each episode; by
        default, no file is written.
      monitor_kwargs: Other arguments of `VecMonitor`: `info_keywords` is a tuple of
        keys. Their values in the last info of each episode are added to
        `info["episode"]` and to the file; if a fault ended the episode, they are
        None.
      **options: Other options of `envserve.make_vec`, such as `num_workers`,
        `env_kwargs` and `wrappers`. `wrapper_class` and `wrapper_kwargs` are accepted
        too: unless `monitor_file` or `monitor_kwargs` is given, a `Monitor` is inside
        this wrapper, as in Stable-Baselines3. `vec_env_cls`, `vec_env_kwargs`,
        `start_index` and SubprocVecEnv's `start_method` have no effect.

    Raises:
      EnvserveError: See `envserve.make_vec`.
      TypeError: An option is unknown, or has no counterpart.
      ValueError: The start method is unknown.
    """
    multiprocessing.get_context(options.pop("start_method", None))
    if isinstance(addresses, int):  # the third argument of SB3's function is the seed
        addresses, seed = None, addresses
    for name in options.keys() & {"num_envs", "num_env", "n_env"}:
        raise TypeError(f"unknown option {name!r}; pass n_envs, as in SB3")
    if options.pop("monitor_dir", None) is not None:
        raise TypeError(
            "monitor_dir: expected no value, because one file contains the episodes of "
            "all envs; pass its path as monitor_file"
        )
    for name in ("vec_env_cls", "vec_env_kwargs", "start_index"):
        options.pop(name, None)
    kwargs = options.pop("wrapper_kwargs", None) or {}
    if (wrapper := options.pop("wrapper_class", None)) is not None:
        wrapper = functools.partial(wrapper, **kwargs)
        inner = [] if addresses or monitor_file or monitor_kwargs else [Monitor]
        options["wrappers"] = [*(options.get("wrappers") or ()), *inner, wrapper]
    fixed_options = {"autoreset": "same_step"}
    batch = make_batch(env, n_envs, addresses, fixed_options, seed=seed, **options)
    with contextlib.ExitStack() as on_error:
        on_error.callback(batch.close)
        keywords = (monitor_kwargs or {}).get("info_keywords", ())
        vec_env = BatchVecEnv(batch, keywords)
        vec_env.seed(seed)
        if seed is not None:
            vec_env.action_space.seed(seed)
        is_monitored = vec_env.env_is_wrapped(Monitor, 0)[0]
        result: VecEnv = vec_env
        if not is_monitored or monitor_file is not None or monitor_kwargs:
            result = VecMonitor(vec_env, monitor_file, **(monitor_kwargs or {}))
            # Otherwise, `result.reset_infos` would be a separate list that stays empty.
            result.reset_infos = vec_env.reset_infos
        on_error.pop_all()
    return result


class BatchVecEnv(VecEnv):
    """A `BatchEnv` as a VecEnv.

    Attributes:
      batch: The batch, with autoreset "same_step"; this object owns it.
    """

    def __init__(self, batch: BatchEnv, info_keywords: Sequence[str] = ()) -> None:
        """Wrap a batch, and take ownership of it.

        Args:
          batch: A batch with autoreset "same_step" and `infos="all"`.
          info_keywords: Keys to add to the last info of each episode that a fault ends.
        """
        self.batch = batch
        names = ("observation_space", "action_space")
        #: Attributes of each env that `get_attr` returns without querying the envs.
        self._local_attributes = {
            n: [getattr(batch, n)] * batch.num_envs for n in names
        }
        self._local_attributes["spec"] = specs_of(batch)
        self._lost_info = dict.fromkeys(info_keywords)
        super().__init__(batch.num_envs, batch.observation_space, batch.action_space)
        self.metadata |= metadata_of(batch)

    def reset(self) -> Any:
        """Reset all envs and return the observations.

        The seeds and options that were set for this reset are cleared.
        """
        if self.batch.num_in_flight:
            self.batch.drain()
        # Replace {} with None, because some envs reject all options, even empty ones.
        options = [each or None for each in self._options]
        # All envs of one reset get the same options, so envs with other options are
        # reset separately. Encoded options are compared, because True equals 1, and
        # comparing arrays returns no bool.
        groups: dict[bytes, list[int]] = {}
        for row, each in enumerate(options):
            groups.setdefault(pack_options(each), []).append(row)
        infos: dict[int, Mapping[str, Any]] = {}
        for rows in groups.values():
            # Before the first step, and after an error, all rows are reset at once.
            indices = rows if self.batch.has_reset else [*range(self.num_envs)]
            seeds = [self._seeds[row] for row in indices]
            self.batch.reset(indices, seeds, options=options[rows[0]])
            infos |= {row: self.batch.reset_infos.get(row, {}) for row in indices}
        observation = self.batch.last_observation()
        self.reset_infos[:] = [dict(infos.get(i, {})) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        self._last_observation = observation
        return observation

    def step_async(self, actions: Any) -> None:
        """Start a step of all envs.

        A step that is still in flight, for example after Ctrl-C, is discarded.

        Args:
          actions: Arrays `[n_envs, ...]`, nested like the action space, or a list of
            the envs' actions.
        """
        self.batch.cancel_step()
        if isinstance(self.action_space, spaces.Dict | spaces.Tuple) and isinstance(
            actions, list | np.ndarray
        ):
            arrays: Any = create_empty_array(self.action_space, len(actions))
            actions = concatenate(self.action_space, actions, arrays)
        self.batch.send(actions, together=True)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Wait for the step; return observations, rewards, dones and infos.

        Rewards are float32 `[n_envs]`.
        """
        try:
            _, step = self.batch.recv(self.num_envs)
        except EnvError:  # discard the other rows, which may have errors, too
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
            space = self.batch.observation_space
            last = final_observations(space, step, self._last_observation)
            for row in dones.nonzero()[0].tolist():
                if not step.valid[row]:
                    infos[row] = {**self._lost_info, **infos[row]}
                infos[row]["terminal_observation"] = copy.deepcopy(last[row])
                info = infos[row].pop("reset_info", None)
                self.reset_infos[row] = info if isinstance(info, dict) else {}
        self._last_observation = step.observation
        return step.observation, step.reward.astype(np.float32), dones, infos

    def close(self) -> None:
        """Close all envs."""
        self.batch.close()

    def get_images(self) -> list[Any]:
        """Return a rendered image of each env."""
        return self.env_method("render")

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all envs have an attribute.

        Servers must expose `has_wrapper_attr` for this.
        """
        try:
            return all(self.env_method("has_wrapper_attr", attr_name))
        except AttributeError:  # vector envs, for example, have no such method
            return bool(super().has_attr(attr_name))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return the values of an attribute of the selected envs, one per env.

        Raises:
          AttributeError: An env has no such attribute.
          CallError: An env raised another exception.
        """
        rows = self._get_indices(indices)
        if attr_name in self._local_attributes:
            return [self._local_attributes[attr_name][row] for row in rows]
        try:
            return self.batch.get_attr(attr_name, rows)
        except CallError as error:
            if error.remote_traceback and not isinstance(error, AttributeError):
                raise
            raise AttributeError(str(error)) from error

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the selected envs to one value."""
        rows = self._get_indices(indices)
        self.batch.set_attr(attr_name, [value for _ in rows], rows)

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of the selected envs, and return one value per env."""
        rows = self._get_indices(indices)
        # HerReplayBuffer passes infos as object arrays, which cannot be encoded.
        plain = [x.tolist() if getattr(x, "dtype", 0) == "O" else x for x in args]
        try:
            return self.batch.call_each(method_name, *plain, env_indices=rows, **kwargs)
        except CallError as error:
            if f" {method_name}: AttributeError: " in str(error):
                raise AttributeError(str(error)) from error
            raise

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Return whether each selected env has a wrapper named like `wrapper_class`."""
        rows = self._get_indices(indices)
        try:
            names = self.batch.get_attr("wrapper_names", rows)
        except CallError:  # vector envs, for example, have no `wrapper_names`
            names = [()] * len(rows)
        return [wrapper_class.__name__ in row_names for row_names in names]

    def _get_indices(self, indices: Any) -> list[int]:
        all_rows = range(self.num_envs)
        return [all_rows[row] for row in super()._get_indices(indices)]
