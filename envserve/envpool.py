"""EnvPool's envs for Gymnasium's registry, as `envpool/NAME`: importing this adds them.

They are vector envs only: ask for them with `vectorized`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import envpool
import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = ["EnvPool"]

_KNOWN: Final = frozenset({"env_id", "players", "elapsed_step"})


class EnvPool(VectorEnv[Any, Any, Any]):
    """An EnvPool that is made anew when it is seeded, each row with a seed of its own.

    Infos are without what a row knows itself: its number, and how many steps it took.
    """

    def __init__(
        self, num_envs: int, task_id: str, num_threads: int = 1, **options: Any
    ) -> None:
        """Takes what `envpool.make` does; by default a worker has one thread."""
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
        """Resets all rows, or those of `options["reset_mask"]` without seeds."""
        if seed is not None:
            if options:
                raise ValueError(f"expected no options with seeds; got {options}")
            own = self.np_random.integers(2**31, size=self.num_envs).tolist()
            given = range(seed, seed + len(own)) if isinstance(seed, int) else seed
            seeds = [
                b if a is None else a % 2**31 for a, b in zip(given, own, strict=True)
            ]
            self.close_extras()
            self._pool = self._make(seed=seeds)
        elif self._pool is None:
            self._pool = self._make()
        observation, infos = self._pool.reset(options=options)
        return observation, _own(infos) if not options else {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all rows."""
        *results, infos = self._pool.step(actions)
        return *results, _own(infos)

    def render(self) -> tuple[Any, ...]:
        """Returns a picture of each row."""
        return tuple(self._pool.render(env_ids=range(self.num_envs)))

    def close_extras(self, **_: Any) -> None:
        """Ends its threads."""
        if self._pool is not None:
            self._pool.close()


def _own(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: infos[key] for key in infos if key not in _KNOWN}


for _name in envpool.list_all_envs():
    gymnasium.register(
        f"envpool/{_name.replace('/', '-')}",
        vector_entry_point=f"{__name__}:EnvPool",
        kwargs={"task_id": _name},
    )
