"""Register EnvPool's envs with Gymnasium as `envpool/NAME`, on import.

EnvPool's envs are always vector envs, so use them with `vectorized=True`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import envpool
import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = ["EnvPool"]

_REDUNDANT_KEYS: Final = frozenset({"env_id", "players", "elapsed_step"})


class EnvPool(VectorEnv[Any, Any, Any]):
    """An EnvPool pool as a Gymnasium vector env.

    A reset with seeds makes a new pool, because EnvPool accepts seeds only at
    construction. If the first reset has no seeds, it draws some. Infos omit EnvPool's
    env id, players and step count of each row.
    """

    def __init__(
        self, num_envs: int, task_id: str, num_threads: int = 1, **options: Any
    ) -> None:
        """Make a pool.

        Args:
          num_envs: Number of rows.
          task_id: Name of the env in EnvPool.
          num_threads: Number of EnvPool threads in each worker.
          **options: Other options of `envpool.make`.
        """
        mode = AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": mode, "reset_mask": True}
        self.num_envs = num_envs
        self.render_mode = options.get("render_mode")
        options |= {"num_envs": num_envs, "num_threads": num_threads}
        self._make = partial(envpool.make_gymnasium, task_id, **options)
        self._pool: Any = None
        spec = envpool.make_spec(task_id, **options)
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows or, without seeds, only those in `options["reset_mask"]`."""
        if seed is not None and options:
            raise ValueError(f"expected no options with seeds; got {options}")
        if seed is not None or self._pool is None:
            # Without seeds, EnvPool would use the same seeds in all workers.
            drawn = self.np_random.integers(2**31, size=self.num_envs).tolist()
            used = range(seed, seed + len(drawn)) if isinstance(seed, int) else seed
            seeds = [
                b if a is None else a % 2**31
                for a, b in zip(used or drawn, drawn, strict=True)
            ]
            self.close_extras()
            self._pool = self._make(seed=seeds)
        observation, infos = self._pool.reset(options=options)
        return observation, _without_redundant_keys(infos) if not options else {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows."""
        *results, infos = self._pool.step(actions)
        return *results, _without_redundant_keys(infos)

    def render(self) -> tuple[Any, ...]:
        """Return one image per row."""
        return tuple(self._pool.render(env_ids=range(self.num_envs)))

    def close_extras(self, **_: Any) -> None:
        """Close the pool and end its threads."""
        if self._pool is not None:
            self._pool.close()


def _without_redundant_keys(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: infos[key] for key in infos if key not in _REDUNDANT_KEYS}


for _name in envpool.list_all_envs():
    gymnasium.register(
        f"envpool/{_name.replace('/', '-')}",
        vector_entry_point=f"{__name__}:EnvPool",
        kwargs={"task_id": _name},
    )
