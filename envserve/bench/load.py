"""What all cases of a run have to do: which envs, how many, which actions."""

from __future__ import annotations

import functools
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled

from envserve import registry
from envserve.bench.case_process import BenchmarkError, Measure

__all__ = [
    "SPEED",
    "Load",
    "action_space",
    "check_env",
    "make_env",
    "stepping",
    "summary",
]

Array = np.ndarray[Any, Any]

#: Name of the number that most cases are compared by.
SPEED: Final = "steps_per_second"
#: Different actions, one after the other, and then again from the first.
_NUM_BATCHES: Final = 64
_WARM_UP_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Load:
    """The work of a case.

    Attributes:
      env_name: Registered name.
      num_envs: Rows of the batch.
      workers: Processes, or threads, that the envs are spread over where one can say.
      seconds: How long one measurement lasts.
      env_kwargs: Arguments of the env.
      import_modules: Modules that register it.
    """

    env_name: str
    num_envs: int
    workers: int
    seconds: float
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    import_modules: tuple[str, ...] = ()

    def actions(self) -> list[Array]:
        """Returns batches of actions `[num_envs, ...]`, the same at every call."""
        space = action_space(self)
        space.seed(0)
        return [
            np.stack([space.sample() for _ in range(self.num_envs)])
            for _ in range(_NUM_BATCHES)
        ]

    def env_functions(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        """Returns what peers take: a function per env that builds it."""
        return [functools.partial(make_env, self)] * self.num_envs


def check_env(name: str, import_modules: Iterable[str] = ()) -> None:
    """Builds an env of that name once, before many processes fail at it.

    Raises:
      UnknownEnv: It is not registered.
      EnvStartError: A module cannot be imported.
      BenchmarkError: Something that it needs is not installed.
    """
    registry.import_env_modules(import_modules)
    try:
        registry.make_env(name, {}).close()
    except DependencyNotInstalled as error:
        if "mujoco" in str(error).lower():
            raise BenchmarkError(
                f"{name} needs MuJoCo: pip install 'envserve[mujoco]'"
            ) from error
        raise BenchmarkError(f"{name} cannot be built: {error}") from error
    except ImportError as error:
        raise BenchmarkError(f"{name} cannot be built: {error}") from error


def make_env(load: Load, **options: Any) -> gymnasium.Env[Any, Any]:
    """Builds one env; `options` go to `gymnasium.make`."""
    for module in load.import_modules:
        importlib.import_module(module)
    return gymnasium.make(load.env_name, **load.env_kwargs, **options)


def action_space(load: Load) -> gymnasium.Space[Any]:
    """Returns the action space of an env."""
    env = make_env(load)
    space = env.action_space
    env.close()
    return space


def stepping(
    step: Callable[[Array], Any], actions: Iterable[Array], load: Load
) -> Measure:
    """Returns a measurement of a batched step, which goes on where the last ended."""
    batches = itertools.cycle(actions)

    def run(seconds: float) -> list[float]:
        clock = time.perf_counter
        instants = [clock()]
        deadline = instants[0] + seconds
        for batch in batches:
            step(batch)
            instants.append(clock())
            if instants[-1] >= deadline:
                break
        return instants

    def measure() -> Mapping[str, float]:
        run(_WARM_UP_SECONDS)
        instants = run(load.seconds)
        return summary(np.diff(instants), load.num_envs)

    return measure


def summary(durations: Array, num_envs: int) -> dict[str, float]:
    """Returns env steps per second, and quantiles of a batch step's microseconds."""
    return {
        SPEED: num_envs * len(durations) / float(durations.sum()),
        "p50_us": float(np.percentile(durations, 50)) * 1e6,
        "p99_us": float(np.percentile(durations, 99)) * 1e6,
    }
