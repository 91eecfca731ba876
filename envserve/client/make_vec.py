"""Envs in other processes, here or on servers, made as Gymnasium makes its own."""

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
from envserve.client.factory import EnvWord
from envserve.client.single_env import Env
from envserve.client.vector_env import MODES, VectorEnv
from envserve.errors import ActionError
from envserve.spaces.action_checks import clip_rounding_errors


def make_vec(
    env: EnvWord,
    num_envs: int,
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
    """Makes equal envs, as `gymnasium.make_vec` does.

    Args:
      env: Registered name, like "HalfCheetah-v5", or an own env; see `BatchEnv.local`.
      num_envs: Number of rows.
      addresses: Servers, like "sim1"; by default the envs run in worker
        processes of this host.
      num_workers: Worker processes here, by default one per core.
      autoreset_mode: "NextStep", "SameStep" or "Disabled", or a member of Gymnasium's
        `AutoresetMode`.
      seed: What seeds follow from where a reset is given none, also of envs that take
        the place of lost ones. By default these envs see None, as one does whose own
        seed is None in a list with others.
      render_mode: As for `gymnasium.make`.
      copy: Whether observations are the caller's to keep. False writes each step's to
        the same arrays.
      wrappers: What each env is wrapped in, by name; see docs/wrappers.md.
      env_kwargs: Other arguments of the env's constructor.
      **options: Others of `BatchEnv.local` or `BatchEnv.connect`. By default a step
        waits for envs that are not there: `padding_after=math.inf`.

    Raises:
      EnvserveError: As for `BatchEnv.local` or `BatchEnv.connect`.
      TypeError: There is no such option.
      ValueError: An option is out of bounds.
    """
    mode = AutoresetMode(autoreset_mode)
    options |= {"seed": seed, "wrappers": wrappers}
    options |= {"render_mode": render_mode, "env_kwargs": env_kwargs}
    autoreset = next(name for name, each in MODES.items() if each is mode)
    instead = "autoreset_mode='SameStep', 'NextStep' or 'Disabled'"
    fixed = {"autoreset": autoreset}
    batch = make_batch(
        env, num_envs, addresses, fixed, instead, num_workers=num_workers, **options
    )
    made = VectorEnv(batch, copy=copy)
    options |= {"addresses": addresses, "num_workers": num_workers, "copy": copy}
    options |= {"autoreset_mode": mode.value, "num_envs": num_envs}
    # Importing that has effects: see there.
    made.spec = _spec_of(env, options, vector_entry_point=f"envserve.gym:{env}")
    return made


def make(
    env: EnvWord,
    address: str | None = None,
    *,
    seed: int | None = None,
    render_mode: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Env:
    """Makes one env, as `gymnasium.make` does.

    Args:
      env: Registered name, like "HalfCheetah-v5", or an own env; see `BatchEnv.local`.
      address: A server, like "sim1"; by default the env runs on this host.
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
    instead = "none, since its caller resets one env"
    made = Env(make_batch(env, 1, addresses, fixed, instead, **options))
    options |= {"env": env, "address": address}
    made.spec = _spec_of(env, options, entry_point="envserve:make")
    return made


def make_batch(
    env: EnvWord,
    num_envs: int,
    addresses: Sequence[str] | None,
    fixed: Mapping[str, Any],
    instead: str = "none, since how the trainer steps envs decides it",
    *,
    num_workers: int | None = None,
    render_mode: str | None = None,
    **options: Any,
) -> BatchEnv:
    """Makes a batch for trainers that know neither padding nor servers; see `make_vec`.

    By default it waits for envs that are not there, has the infos of every step, passes
    on what is not finite, and seeds no env unless there is a root seed.

    Raises:
      TypeError: An option is given that is `fixed`; says what to do `instead`.
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
        return BatchEnv.connect(env, addresses, num_envs, **given)
    raise ValueError(
        f"num_workers: expected none with addresses, since servers have their own "
        f"(envserve start --workers); got {num_workers}"
    )


def send_step(batch: BatchEnv, actions: Any, rows: Sequence[int] | None = None) -> None:
    """Starts a step, of trainers that scale actions to a Box's bounds by themselves."""
    try:
        batch.send(actions, rows, together=True)
        return
    except ActionError:  # here it costs nothing where all is well
        near = clip_rounding_errors(batch.action_space, actions)
    batch.send(near, rows, together=True)


def _spec_of(env: EnvWord, kwargs: Mapping[str, Any], **changes: Any) -> EnvSpec | None:
    """Returns what makes such envs again, if the env is registered here too."""
    if not isinstance(env, str) or env not in gymnasium.registry:
        return None
    changes["kwargs"] = {k: v for k, v in kwargs.items() if v not in (None, ())}
    return dataclasses.replace(copying.deepcopy(gymnasium.registry[env]), **changes)
