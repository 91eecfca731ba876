"""A vector env for Tianshou, with envs in worker processes or on servers.

Tianshou may step any subset of the rows, so each row is a block. It cannot mask invalid
rows, so an episode that a fault ends is returned as a truncated one, and steps wait for
absent envs instead of returning padding. Only this module imports Tianshou.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from envserve.client import BatchEnv
from envserve.client.make_vec import make_batch
from envserve.client.vector_env import specs_of
from envserve.errors import EnvError
from envserve.spaces.leaves import Array, unbatch
from envserve.text import install_command

try:
    from tianshou.env import BaseVectorEnv
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; {install_command('tianshou')}") from error

__all__ = ["BatchVectorEnv", "make_vector_env"]


def make_vector_env(
    env: Any,
    num_envs: int | None = None,
    addresses: Sequence[str] | None = None,
    **options: Any,
) -> BatchVectorEnv:
    """Make a vector env for Tianshou; see `envserve.make_vec` for the arguments."""
    if num_envs is None:
        num_envs = len(env) if isinstance(env, list | tuple) else 1
    forced = {"autoreset": "disabled", "num_splits": num_envs}
    return BatchVectorEnv(make_batch(env, num_envs, addresses, forced, **options))


class BatchVectorEnv(BaseVectorEnv):
    """A `BatchEnv` with one block per row, as a Tianshou vector env.

    Attributes:
      batch: The batch; this object owns it.
    """

    def __init__(self, batch: BatchEnv) -> None:
        self.batch = batch
        batch.reset_call = "reset(env_id=...)"
        self.env_num = batch.num_envs
        self.is_async = self.is_closed = False
        self._specs = specs_of(batch)
        self._last_observations: list[Any] = [None] * self.env_num
        #: Collectors draw random actions from the space of each env.
        self._action_spaces = [
            copy.deepcopy(batch.action_space) for _ in range(self.env_num)
        ]

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """Return an attribute of the selected envs, one value per env.

        The spaces and the spec are returned without querying the envs.
        """
        rows = self._wrap_id(id)
        if key == "spec":
            return [self._specs[row] for row in rows]
        if key == "action_space":
            return [self._action_spaces[row] for row in rows]
        if key == "observation_space":
            return [self.batch.observation_space] * len(rows)
        return self.batch.get_attr(key, rows)

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set an attribute of the selected envs to one value."""
        rows = self._wrap_id(id)
        self.batch.set_attr(key, [value] * len(rows), rows)

    def reset(self, env_id: Any = None, **kwargs: Any) -> tuple[Array, Array]:
        """Reset the selected envs with the given `seed` and `options`.

        Returns:
          Observations and infos, in the order of `env_id`.
        """
        self.batch.cancel_step()  # if Ctrl-C has interrupted `step`
        rows = self._wrap_id(env_id)
        indices = None if env_id is None else rows
        seeds = [kwargs.get("seed")] * len(rows)
        observation = self.batch.reset(indices, seeds, options=kwargs.get("options"))
        infos = [dict(self.batch.reset_infos.get(int(row), {})) for row in rows]
        return self._store_first_observations(rows, observation), np.array(infos)

    def step(self, action: Any, id: Any = None) -> tuple[Any, ...]:
        """Step the selected envs; return transitions and infos in the order of `id`."""
        self.batch.cancel_step()  # if Ctrl-C has interrupted `step`
        rows = self._wrap_id(id)
        order = np.argsort(np.argsort(rows))
        self.batch.send(np.asarray(action), rows, together=True)
        try:
            _, step = self.batch.recv(env_indices=rows)
        except EnvError:  # discard the other rows, which may have errors, too
            self.batch.drain()
            raise
        # Tianshou's buffers cannot store strings that only some rows have, such as the
        # text of a fault.
        infos = [
            {**(step.infos.get(row, {}) if valid else {"lost": True}), "env_id": row}
            for row, valid in zip(map(int, rows), step.valid[order], strict=True)
        ]
        ends = (step.reward[order], step.terminated[order], step.truncated[order])
        stacked = self._stack(step.observation, order)
        # If a fault ended the episode of a row, the row contains the first observation
        # of the next episode, but Tianshou expects the last one of the ended episode.
        for position in step.lost[order].nonzero()[0]:
            stacked[position] = self._last_observations[rows[position]]
        return self._store_observations(rows, stacked), *ends, np.array(infos)

    def seed(self, seed: Any = None) -> list[Any]:
        """Reset env i with `seed + i`, or with `seed[i]` if `seed` is a list.

        Seed the action spaces, too. Return the seeds, each in a list; without a seed,
        reset nothing.
        """
        seeds = range(seed, seed + self.env_num) if isinstance(seed, int) else seed
        if seeds is not None:
            self.batch.cancel_step()  # if Ctrl-C has interrupted `step`
            observation = self.batch.reset(seeds=list(seeds))
            self._store_first_observations(range(self.env_num), observation)
            for space, each in zip(self._action_spaces, seeds, strict=True):
                space.seed(each)
        return [[item] for item in seeds or [None] * self.env_num]

    def render(self, **kwargs: Any) -> list[Any]:
        """Return a rendered image of each env."""
        return self.batch.call_each("render", **kwargs)

    def close(self) -> None:
        """Close all envs."""
        self.is_closed = True
        self.batch.close()

    def _store_first_observations(self, rows: Any, observation: Any) -> Array:
        stacked = self._stack(observation, np.arange(len(rows)))
        return self._store_observations(rows, stacked)

    def _store_observations(self, rows: Any, observations: Array) -> Array:
        for row, observation in zip(rows, observations, strict=True):
            self._last_observations[row] = observation
        return observations

    def _stack(self, observation: Any, order: Array) -> Array:
        # Tianshou expects nested observations as an array of dicts.
        if not isinstance(observation, np.ndarray):
            space, rows = self.batch.observation_space, range(len(order))
            observation = np.array(unbatch(space, observation, rows))
        return observation[order]
