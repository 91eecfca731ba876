"""Lets every env be reset by `reset(seed=..., options=...)`, as Gymnasium's are.

Who declares less gets less, and an error if it is to get what it does not take.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import gymnasium

from envserve.errors import EnvStartError

__all__ = ["complete"]

Env = gymnasium.Env[Any, Any]

_REMEDY: Final = "declare `def reset(self, *, seed=None, options=None)`"


def complete(env: Env, *, needs_seed: bool) -> Env:
    """Makes a new env take both arguments, by way of its wrappers, if it has any.

    Raises:
      EnvStartError: Its first reset will get a seed, and it does not take one.
    """
    if isinstance(env, gymnasium.Wrapper):
        env.env = complete(env.env, needs_seed=needs_seed)
    parameters = inspect.signature(env.reset).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return env
    lacking = [name for name in ("seed", "options") if name not in parameters]
    if needs_seed and "seed" in lacking:
        raise EnvStartError(
            f"{type(env).__name__}.reset() takes no seed, and every env's first reset "
            f"gets one; {_REMEDY}, or ask for envs with seeded=False"
        )
    return _ShortReset(env, lacking) if lacking else env


class _ShortReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stands in front of an env whose `reset` lacks an argument."""

    def __init__(self, env: Env, lacking: list[str]) -> None:
        super().__init__(env)
        self._lacking = lacking

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        for name in self._lacking:
            if given.pop(name) is not None:
                who = type(self.env).__name__
                raise TypeError(f"{who}.reset() takes no {name}; {_REMEDY}")
        return self.env.reset(**given)
