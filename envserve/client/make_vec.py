"""`make` and `make_vec`: counterparts of `gymnasium.make` and `gymnasium.make_vec`."""

from __future__ import annotations

import copy as copying
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from envserve.client.batch_env import BatchEnv
from envserve.client.factory import EnvLike
from envserve.client.single_env import Env
from envserve.client.vector_env import AUTORESET_MODES, VectorEnv
from envserve.errors import ActionError
from envserve.spaces.action_checks import clip_rounding_errors


def make_vec(
    env: EnvLike,
    num_envs: int | None = None,
    addresses: Sequence[str] | None = None,
    *,
    num_workers: int | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    seed: int | None = None,
    render_mode: str | None = None,
    copy: bool = True,
    wrappers: Sequence[Mapping[str, Any]] = (),
    env_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> VectorEnv:
    """Make a vector env of identical envs, like `gymnasium.make_vec`.

    Args:
      env: Registered name, like "HalfCheetah-v5", or your env; see `BatchEnv.local`.
      num_envs: Number of envs.
      addresses: Server addresses, like "sim1"; by default, the envs run in worker
        processes on this host.
      num_workers: Number of worker processes on this host; by default one per core.
      autoreset_mode: "NextStep", "SameStep" or "Disabled", or a member of Gymnasium's
        `AutoresetMode`.
      seed: Root seed, from which an env's seed is derived if its first reset specifies
        none. Envs that replace failed ones also get their seeds from it. By default,
        all these envs are reset with seed None.
      render_mode: As for `gymnasium.make`.
      copy: Whether each step returns new observation arrays. If False, each step
        overwrites the observations of an earlier step.
      wrappers: Wrappers of each env, by name; see docs/wrappers.md.
      env_kwargs: Other arguments of the env's constructor.
      **options: Other options of `BatchEnv.local` or `BatchEnv.connect`. By default a
        step waits for absent envs: `padding_after=math.inf`.

    Raises:
      EnvserveError: As for `BatchEnv.local` or `BatchEnv.connect`.
      TypeError: An option is unknown.
      ValueError: An option is out of bounds.
    """
    mode = AutoresetMode(autoreset_mode)
    options |= {"seed": seed, "wrappers": wrappers}
    options |= {"render_mode": render_mode, "env_kwargs": env_kwargs}
    autoreset = next(name for name, each in AUTORESET_MODES.items() if each is mode)
    instead = "autoreset_mode='SameStep', 'NextStep' or 'Disabled'"
    fixed = {"autoreset": autoreset}
    batch = make_batch(
        env, num_envs, addresses, fixed, instead, num_workers=num_workers, **options
    )
    made = VectorEnv(batch, copy=copy)
    options |= {"addresses": addresses, "num_workers": num_workers, "copy": copy}
    options |= {"autoreset_mode": mode.value, "num_envs": batch.num_envs}
    # Gymnasium imports `envserve.gym` only when it uses this entry point. The import
    # changes the registry; see that module's docstring.
    made.spec = _spec_of(env, options, vector_entry_point=f"envserve.gym:{env}")
    return made


def make(
    env: EnvLike,
    address: str | None = None,
    *,
    seed: int | None = None,
    render_mode: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Env:
    """Make one env, like `gymnasium.make`.

    Args:
      env: Registered name, like "HalfCheetah-v5", or your env; see `BatchEnv.local`.
      address: Address of a server, like "sim1"; by default, the env runs in a worker
        process on this host.
      seed: As for `make_vec`.
      render_mode: As for `gymnasium.make`.
      env_kwargs: Other arguments of the env's constructor.
      **options: As for `make_vec`.

    Raises:
      EnvserveError: As for `make_vec`.
    """
    options |= {"seed": seed, "render_mode": render_mode, "env_kwargs": env_kwargs}
    addresses = None if address is None else [address]
    fixed = {"autoreset": "disabled"}
    instead = "no value, because the caller resets the env"
    made = Env(make_batch(env, 1, addresses, fixed, instead, **options))
    options |= {"env": env, "address": address}
    made.spec = _spec_of(env, options, entry_point="envserve:make")
    return made


def make_batch(
    env: EnvLike,
    num_envs: int | None,
    addresses: Sequence[str] | None,
    fixed: Mapping[str, Any],
    instead: str = "no value, because the trainer determines it",
    *,
    num_workers: int | None = None,
    render_mode: str | None = None,
    **options: Any,
) -> BatchEnv:
    """Make a batch for trainers that do not support padding; see `make_vec`.

    The defaults differ from those of `BatchEnv`: steps wait for absent envs, return the
    infos of all rows and do not check for NaN and infinity, and envs are seeded only if
    a root seed is given.

    Args:
      env: As for `make_vec`.
      num_envs: As for `make_vec`.
      addresses: As for `make_vec`.
      fixed: Options that the user must not set, with their values.
      instead: What to pass instead of such an option, for the error message.
      num_workers: As for `make_vec`.
      render_mode: As for `make_vec`.
      **options: As for `make_vec`.

    Raises:
      TypeError: The user has set an option that is `fixed`.
    """
    for name in sorted(options.keys() & {*fixed, "autoreset_mode"}):
        raise TypeError(f"{name}: expected {instead}; got {name}={options[name]!r}")
    given: dict[str, Any] = {"infos": "all", "nonfinite": "pass"}
    given |= {"padding_after": math.inf, "seeded": options.get("seed") is not None}
    given |= {**options, **fixed}
    if render_mode is not None:
        given["env_kwargs"] = {**(given.get("env_kwargs") or {})}
        given["env_kwargs"]["render_mode"] = render_mode
    if addresses is None:
        return BatchEnv.local(env, num_envs, num_workers, **given)
    if num_workers is None:
        return BatchEnv.connect(env, addresses, num_envs or 1, **given)
    raise ValueError(
        f"num_workers: expected None with addresses, because each server sets it "
        f"(envserve start --workers); got {num_workers}"
    )


def send_step(batch: BatchEnv, actions: Any, rows: Sequence[int] | None = None) -> None:
    """Start a step; tolerate actions that exceed a Box's bounds by rounding errors.

    Such errors occur in trainers that scale actions to the bounds of a Box.
    """
    try:
        batch.send(actions, rows, together=True)
        return
    except ActionError:  # clip only now, so that valid actions cost no extra time
        near = clip_rounding_errors(batch.action_space, actions)
    batch.send(near, rows, together=True)


def _spec_of(env: EnvLike, kwargs: Mapping[str, Any], **changes: Any) -> EnvSpec | None:
    """Return a spec that recreates the env; None if it is not registered here."""
    if not isinstance(env, str) or env not in gymnasium.registry:
        return None
    changes["kwargs"] = {k: v for k, v in kwargs.items() if v not in (None, ())}
    return dataclasses.replace(copying.deepcopy(gymnasium.registry[env]), **changes)
