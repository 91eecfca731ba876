"""Adapt envs whose `reset` lacks the arguments `seed` or `options`.

The worker calls `reset(seed=..., options=...)`, as Gymnasium defines it. An argument
that the env does not declare is dropped if it is None or empty; otherwise an error is
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import gymnasium

from envserve.envs.registry import parameters_of
from envserve.errors import EnvStartError

_REMEDY: Final = "declare `def reset(self, *, seed=None, options=None)`"


def complete_reset_signature(env: Any, *, needs_seed: bool) -> None:
    """Make the `reset` of an env, and of the envs in it, take a seed and options.

    Args:
      env: The env, which need not derive from `gymnasium.Env`.
      needs_seed: Whether the first reset passes a seed.

    Raises:
      EnvStartError: The env's `reset` does not accept a seed that the first reset
        passes.
    """
    parameters = parameters_of(env.reset)
    if isinstance(env, gymnasium.Wrapper):
        # Gymnasium's wrappers pass the seed on. Others may use it if they declare it.
        module = str(getattr(type(env).reset, "__module__", ""))
        declares_seed = "seed" in (parameters or ())
        passes_seed = module.startswith("gymnasium.") or not declares_seed
        complete_reset_signature(env.env, needs_seed=needs_seed and passes_seed)
    if parameters is None or any(
        param.kind is param.VAR_KEYWORD for param in parameters.values()
    ):
        return
    missing = [name for name in ("seed", "options") if name not in parameters]
    name = type(env).__name__
    if needs_seed and "seed" in missing:
        raise EnvStartError(
            f"{name}.reset() does not accept seed, but the first reset of every env "
            f"passes one; {_REMEDY}, or use seeded=False"
        )
    if missing:
        completed = partial(_reset_without, missing, name, env.reset)
        # The env's own `__setattr__` may reject the attribute.
        object.__setattr__(env, "reset", completed)


def _reset_without(
    missing: Sequence[str],
    env_type: str,
    reset: Callable[..., Any],
    *positional: Any,
    **arguments: Any,
) -> Any:
    """Call `reset` without the arguments that it does not declare."""
    for name in missing:
        # A wrapper around the env may pass only the arguments that the env declares.
        if arguments.pop(name, None) not in (None, {}):
            raise TypeError(f"{env_type}.reset() does not accept {name}; {_REMEDY}")
    return reset(*positional, **arguments)
