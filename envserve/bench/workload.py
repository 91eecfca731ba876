"""What all cases of a run do: which envs, how many, which actions, and for how long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector.utils import batch_space

from envserve.envs.registry import find_spec, import_env_modules, make_env
from envserve.errors import EnvStartError

#: Different actions, one after the other, and then again from the first.
_NUM_BATCHES: Final = 64


@dataclass(frozen=True)
class Workload:
    """The work of a case.

    Attributes:
      env_name: Registered name.
      num_envs: Rows of the batch.
      num_workers: Processes, or threads, that they are spread over where one can say.
      seconds: Length of one measurement.
      env_kwargs: Arguments of the env.
      import_modules: Modules that register it.
    """

    env_name: str
    num_envs: int
    num_workers: int
    seconds: float
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    import_modules: tuple[str, ...] = ()

    def check(self) -> None:
        """Builds one env, before many processes fail at it.

        Raises:
          UnknownEnv: It is not registered.
          EnvStartError: A module cannot be imported, or what the env needs is missing.
        """
        import_env_modules(self.import_modules)
        try:
            make_env(self.env_name, self.env_kwargs).close()
        except (DependencyNotInstalled, ImportError) as error:
            raise EnvStartError(f"{self.env_name} cannot be built: {error}") from error

    def actions(self) -> list[Any]:
        """Returns batches of actions `[num_envs, ...]`, the same at every call."""
        space = self.action_space()
        space.seed(0)
        return [space.sample() for _ in range(_NUM_BATCHES)]

    def action_space(self) -> gymnasium.Space[Any]:
        """Returns the space of a batch's actions."""
        env = _make_env(self)
        env.close()
        return batch_space(env.action_space, self.num_envs)

    def env_functions(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """Returns what peers take: a function per env that builds it."""
        return [functools.partial(_make_env, self)] * self.num_envs


def _make_env(load: Workload) -> gymnasium.Env[Any, Any]:
    """Builds one env as its users do, in Gymnasium's wrappers."""
    import_env_modules(load.import_modules)
    return gymnasium.make(find_spec(load.env_name), **load.env_kwargs)
