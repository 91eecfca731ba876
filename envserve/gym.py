"""Support for `gymnasium.make_vec("envserve.gym:CartPole-v1", num_envs=4)`.

Gymnasium imports the module before the colon, and then makes the env that is registered
under the name after the colon. Therefore, importing this module has a side effect: it
sets the vector entry point of all registered envs to `envserve.make_vec`. From then on,
`gymnasium.make_vec("CartPole-v1")` also uses envserve, unless `vectorization_mode` is
"sync" or "async". Envs that are registered after this import are not affected. For envs
that are not registered in this process, use `envserve/Remote-v0`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium

from envserve.client.make_vec import make_vec as _make_vec
from envserve.client.vector_env import VectorEnv
from envserve.envs.pickled_code import replaced_entry_points

__all__ = ["make_vec"]


def make_vec(
    env: str, max_episode_steps: int | None = None, **kwargs: Any
) -> VectorEnv:
    """Call `envserve.make_vec` with the arguments that `gymnasium.make_vec` passes.

    Args:
      env: Registered name.
      max_episode_steps: Maximum number of steps per episode; passed to the env if it
        differs from the registered value.
      **kwargs: Options of `envserve.make_vec`, and arguments of the env. Arguments that
        equal the registered ones are not passed to the env, because a server may reject
        them.
    """
    registered = gymnasium.registry.get(env)
    if registered is not None:
        if max_episode_steps == registered.max_episode_steps:
            max_episode_steps = None
        for name, value in registered.kwargs.items():
            if name in kwargs and _are_equal(kwargs[name], value):
                del kwargs[name]
    return _make_vec(env, max_episode_steps=max_episode_steps, **kwargs)


def _are_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # arrays and tensors have no single truth value
        return False


def __getattr__(name: str) -> Callable[..., VectorEnv]:
    """Return an entry point for the registered env with this name."""
    if name not in gymnasium.registry:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(make_vec, name)


for _spec in gymnasium.registry.values():
    if not str(_spec.vector_entry_point).startswith(f"{__name__}:"):
        replaced_entry_points[_spec.id] = _spec.vector_entry_point
    _spec.vector_entry_point = f"{__name__}:{_spec.id}"
gymnasium.register(
    "envserve/Remote-v0",
    entry_point="envserve:make",
    vector_entry_point=f"{__name__}:make_vec",
)
