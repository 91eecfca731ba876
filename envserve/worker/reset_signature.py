"""Adapt envs whose `reset` lacks the arguments `seed` or `options`.

The worker calls `reset(seed=..., options=...)`, as Gymnasium defines it. An argument
that the env does not declare is dropped if it is None or empty; otherwise an error is
raised.
"""

from __future__ import annotations

from typing import Any, Final

import gymnasium

from envserve.envs.registry import parameters_of
from envserve.errors import EnvStartError

Env = gymnasium.Env[Any, Any]

_REMEDY: Final = "declare `def reset(self, *, seed=None, options=None)`"


def complete_reset_signature(env: Env, *, needs_seed: bool) -> Env:
    """Return an env whose `reset` takes a seed and options; adapt wrapped envs, too.

    Args:
      env: The env.
      needs_seed: Whether the first reset passes a seed.

    Raises:
      EnvStartError: The env's `reset` does not accept a seed that the first reset
        passes.
    """
    if isinstance(env, gymnasium.Wrapper):
        env.env = complete_reset_signature(env.env, needs_seed=needs_seed)
    parameters = parameters_of(env.reset)
    if parameters is None or any(
        param.kind is param.VAR_KEYWORD for param in parameters.values()
    ):
        return env
    missing = [name for name in ("seed", "options") if name not in parameters]
    if needs_seed and "seed" in missing:
        raise EnvStartError(
            f"{type(env).__name__}.reset() does not accept seed, but the first reset "
            f"of every env passes one; {_REMEDY}, or use seeded=False"
        )
    return _DropMissingArguments(env, missing) if missing else env


class _DropMissingArguments(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Drops arguments that the env's `reset` does not declare."""

    def __init__(self, env: Env, missing: list[str]) -> None:
        super().__init__(env)
        self._missing = missing

    def reset(self, *positional: Any, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        for name in self._missing:
            # A wrapper around this one may pass only what the env declares.
            if arguments.pop(name, None) not in (None, {}):
                env_type = type(self.env).__name__
                raise TypeError(f"{env_type}.reset() does not accept {name}; {_REMEDY}")
        return self.env.reset(*positional, **arguments)
