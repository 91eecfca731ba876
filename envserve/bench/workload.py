"""The envs and actions of a benchmark, and the length of its measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector.utils import batch_space

from envserve.envs.registry import find_spec, import_env_modules, make_env
from envserve.errors import EnvserveError, EnvStartError

#: Number of different action batches; each case cycles through them.
_NUM_ACTION_BATCHES: Final = 64


@dataclass(frozen=True)
class Workload:
    """The envs that a case steps, and the length of a measurement.

    Attributes:
      env_name: Registered name of the env.
      num_envs: Number of envs in the batch.
      num_workers: Number of worker processes or threads, for cases that can set it.
      seconds: Length of one measurement in seconds.
      env_kwargs: Constructor arguments of the env.
      import_modules: Modules that register the env.
    """

    env_name: str
    num_envs: int
    num_workers: int
    seconds: float
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    import_modules: tuple[str, ...] = ()

    def check(self) -> None:
        """Build one env, so that an error is raised here, not in each process.

        Raises:
          UnknownEnv: The env is not registered.
          EnvStartError: A module cannot be imported, or the env cannot be built.
        """
        import_env_modules(self.import_modules)
        try:
            make_env(self.env_name, self.env_kwargs).close()
        except EnvserveError:
            raise
        except (DependencyNotInstalled, ImportError) as error:
            raise EnvStartError(f"{self.env_name} cannot be built: {error}") from error
        except Exception as error:
            text = f"{self.env_name} cannot be built: {type(error).__name__}: {error}"
            raise EnvStartError(text) from error

    def actions(self) -> list[Any]:
        """Return batches of actions `[num_envs, ...]`, the same ones in each call."""
        space = self.action_space()
        space.seed(0)
        return [space.sample() for _ in range(_NUM_ACTION_BATCHES)]

    def action_space(self) -> gymnasium.Space[Any]:
        """Return the action space of the batch."""
        env = _make_env(self)
        env.close()
        return batch_space(env.action_space, self.num_envs)

    def env_functions(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """Return one function per env that builds it, for Gymnasium's vector envs."""
        return [functools.partial(_make_env, self)] * self.num_envs


def _make_env(load: Workload) -> gymnasium.Env[Any, Any]:
    """Build one env as users do, with the wrappers that Gymnasium adds."""
    import_env_modules(load.import_modules)
    return gymnasium.make(find_spec(load.env_name), **load.env_kwargs)
