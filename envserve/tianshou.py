"""Envs for Tianshou: its vector env, here or on servers.

Importing this module imports Tianshou, which nothing else here does. It steps any rows,
so each is a block. A lost episode is a truncated one there; padding is waited out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from envserve.client import BatchEnv
from envserve.client.make_vec import make_batch, send_step
from envserve.errors import EnvError

try:
    from tianshou.env import BaseVectorEnv
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'envserve[tianshou]'") from error

__all__ = ["BatchVectorEnv", "make_vector_env"]

Array = np.ndarray[Any, Any]


def make_vector_env(
    env: Any, num_envs: int, addresses: Sequence[str] | None = None, **options: Any
) -> BatchVectorEnv:
    """Makes envs as Tianshou takes them; as for `envserve.make_vec`."""
    fixed = {"autoreset": "disabled", "num_splits": num_envs}
    return BatchVectorEnv(make_batch(env, num_envs, addresses, fixed, **options))


class BatchVectorEnv(BaseVectorEnv):
    """A batch of envs, each a block of its own, as Tianshou's vector env.

    Attributes:
      batch: The batch, which this owns.
    """

    def __init__(self, batch: BatchEnv) -> None:
        self.batch = batch
        self.env_num = batch.num_envs
        self.is_async = self.is_closed = False
        self._seen: list[Any] = [None] * self.env_num  # what each env showed last

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """Returns an attribute of each of these envs; some without asking them."""
        rows = self._wrap_id(id)
        if key == "spec":
            return [gymnasium.registry.get(self.batch.spec.env_name)] * len(rows)
        if key in ("action_space", "observation_space"):
            return [getattr(self.batch, key)] * len(rows)
        return self.batch.get_attr(key, rows)

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Sets an attribute of each of these envs."""
        rows = self._wrap_id(id)
        self.batch.set_attr(key, [value] * len(rows), rows)

    def reset(self, env_id: Any = None, **kwargs: Any) -> tuple[Array, Array]:
        """Resets these envs, with `seed` and `options`; returns rows and infos."""
        if self.batch.num_in_flight:  # such as after Ctrl-C
            self.batch.drain()
        rows = self._wrap_id(env_id)
        chosen = None if env_id is None else rows
        seeds = [kwargs.get("seed")] * len(rows)
        observation = self.batch.reset(chosen, seeds, options=kwargs.get("options"))
        infos = [dict(self.batch.reset_infos.get(int(row), {})) for row in rows]
        stacked = self._stacked(observation, np.arange(len(rows)))
        return self._shown(rows, stacked), np.array(infos)

    def step(self, action: Any, id: Any = None) -> tuple[Any, ...]:
        """Steps these envs; returns their rows in that order, and infos."""
        rows = self._wrap_id(id)
        order = np.argsort(np.argsort(rows))
        send_step(self.batch, np.asarray(action), rows)
        try:
            _, step = self.batch.recv(env_indices=rows)
        except EnvError:  # the first error of a step is the one to tell
            self.batch.drain()
            raise
        # Its buffers take no text that only some rows have, like that of a fault.
        infos = [
            {**(step.infos.get(row, {}) if valid else {"lost": True}), "env_id": row}
            for row, valid in zip(map(int, rows), step.valid[order], strict=True)
        ]
        ends = (step.reward[order], step.terminated[order], step.truncated[order])
        stacked = self._stacked(step.observation, order)
        for place in step.lost[order].nonzero()[0]:  # of the next episode's
            stacked[place] = self._seen[rows[place]]
        return self._shown(rows, stacked), *ends, np.array(infos)

    def seed(self, seed: Any = None) -> list[Any]:
        """Resets env i with `seed + i`, or with its own of a list."""
        seeds = range(seed, seed + self.env_num) if isinstance(seed, int) else seed
        if seeds is not None:
            if self.batch.num_in_flight:
                self.batch.drain()
            self.batch.reset(seeds=list(seeds))
        return [[each] for each in seeds or [None] * self.env_num]

    def render(self, **kwargs: Any) -> list[Any]:
        """Returns what each env renders."""
        return self.batch.call_each("render", **kwargs)

    def close(self) -> None:
        """Ends all envs."""
        self.is_closed = True
        self.batch.close()

    def _shown(self, rows: Any, observations: Array) -> Array:
        for row, observation in zip(rows, observations, strict=True):
            self._seen[row] = observation
        return observations

    def _stacked(self, observation: Any, order: Array) -> Array:
        if not isinstance(observation, np.ndarray):  # an array of dicts
            space = batch_space(self.batch.observation_space, len(order))
            observation = np.array(list(iterate(space, observation)))
        return observation[order]
