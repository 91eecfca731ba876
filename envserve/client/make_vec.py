"""`make` and `make_vec`: counterparts of `gymnasium.make` and `gymnasium.make_vec`."""

from __future__ import annotations

import contextlib
import copy as copying
import difflib
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, Final, Unpack

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode
from gymnasium.vector import AutoresetMode

from envserve.client.batch_env import BatchEnv
from envserve.client.factory import EnvLike, OnFault, OnServerLost
from envserve.client.single_env import Env
from envserve.client.vector_env import (
    AUTORESET_MODES,
    VectorEnv,
    parse_observation_mode,
)
from envserve.envs.registry import arguments_of, env_creator_of
from envserve.settings import Autoreset, LocalOptions

_AUTORESET_CHOICES: Final = "'SameStep', 'NextStep' or 'Disabled'"
#: Arguments of `AsyncVectorEnv` that change nothing: rows are always in shared memory,
#: and workers are always forked from one process.
_WITHOUT_EFFECT: Final = ("shared_memory", "context", "daemon")


class Options(LocalOptions, total=False):
    """Options of `make_vec` and `make`: those of `BatchEnv.local` and `connect`.

    At runtime, other keywords are arguments of the env, as in `gymnasium.make_vec`.
    Type checkers accept arguments of the env only in `env_kwargs`, so that they find
    misspelt options.
    """

    id: EnvLike
    env_fns: Sequence[Callable[[], Any]]
    on_fault: OnFault
    padding_after: float
    start_timeout: float
    connect_timeout: float
    server_lost_after: float
    operation_timeout: float
    on_server_lost: OnServerLost
    num_servers: int | None
    min_servers: int | None
    insecure: bool
    max_row_mib: int


def make_vec(
    env: EnvLike | None = None,
    num_envs: int | None = None,
    addresses: Sequence[str] | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    *,
    vectorization_mode: VectorizeMode | str | None = None,
    max_episode_steps: int | None = None,
    num_workers: int | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    render_mode: str | None = None,
    copy: bool = True,
    **options: Unpack[Options],
) -> VectorEnv:
    """Make a vector env of identical envs, like `gymnasium.make_vec`.

    Args:
      env: Registered name, like "HalfCheetah-v5", a spec, your env, or a list of
        functions as for `gymnasium.vector.AsyncVectorEnv`; see `BatchEnv.local`.
      num_envs: Number of envs; by default 1, or the number of functions.
      addresses: Server addresses, like "sim1"; by default, the envs run in worker
        processes on this host.
      vectorization_mode: Accepted for `gymnasium.make_vec`: "vector_entry_point" is
        the option `vectorized`; "sync" and "async" have no effect.
      vector_kwargs: Accepted for `gymnasium.make_vec`: `autoreset_mode`, `copy` and
        `observation_mode` are used; `shared_memory`, `context` and `daemon` have no
        effect.
      max_episode_steps: Maximum number of steps per episode; by default, the registered
        one.
      num_workers: Number of worker processes on this host; by default one per core.
      autoreset_mode: "NextStep", "SameStep" or "Disabled", or a member of Gymnasium's
        `AutoresetMode`.
      render_mode: See `gymnasium.make`.
      copy: Whether each step returns new observation arrays. If False, each step
        overwrites the observations of an earlier step.
      **options: See "Keyword Args".

    Keyword Args:
      seed: Root seed. If the first reset of an env specifies no seed, it uses one that
        is derived from the root seed; so does the first reset of an env that replaces a
        failed one. By default, these resets use seed None.
      wrappers: Wrappers of each env: names, dicts, or, on this host, classes and
        functions; see "Wrappers" in the docs.
      env_kwargs: Arguments of the env's constructor, or a list with those of each env;
        see "Use your own env" in the docs. Arguments for all envs can also be passed
        directly, as to `gymnasium.make_vec`, unless an option has the same name.
      actions: Handling of finite actions outside the action space: "pass" (default)
        passes them to the env, as Gymnasium does, "clip" clips them to the bounds of a
        Box, and "check" raises ActionError unless the difference is a rounding error.
      observation_mode: See `gymnasium.vector.AsyncVectorEnv`: "same", "different" if
        the observation spaces have different bounds, or a tuple of the batched and the
        single observation space, in this order.
      infos: See `BatchEnv.local`; "all" by default.
      nonfinite: See `BatchEnv.local`; "pass" by default.
      padding_after: See `BatchEnv.local`; `math.inf` by default, so a step waits for
        absent envs. The other options are also those of `BatchEnv.local` or
        `BatchEnv.connect`, except `autoreset`.

    Raises:
      EnvserveError: See `BatchEnv.local` or `BatchEnv.connect`.
      TypeError: An option is unknown.
      ValueError: An option is out of bounds.
    """
    modes = [mode.value for mode in VectorizeMode]
    if isinstance(addresses, VectorizeMode) or addresses in modes:
        # In `gymnasium.make_vec`, the third argument is the vectorization mode.
        addresses, vectorization_mode = None, addresses
    settings: dict[str, Any] = {
        **options,
        "num_envs": num_envs,
        "addresses": addresses,
        "vector_kwargs": vector_kwargs,
        "vectorization_mode": vectorization_mode,
        "max_episode_steps": max_episode_steps,
        "num_workers": num_workers,
        "autoreset_mode": autoreset_mode,
        "render_mode": render_mode,
        "copy": copy,
    }
    env = _separate_env_kwargs(env, settings, make_vec)
    _apply_gymnasium_options(settings)
    autoreset = _autoreset_of(settings.pop("autoreset_mode"))
    expected = f"autoreset_mode={_AUTORESET_CHOICES}"
    is_copied = settings.pop("copy")
    mode = settings.get("observation_mode", "same")
    settings["observation_mode"] = parse_observation_mode(mode)
    fixed = {"autoreset": autoreset}
    all_options = {**settings, "actions": settings.get("actions") or "pass"}
    batch = make_batch(env, fixed=fixed, expected=expected, **all_options)
    envs = VectorEnv(batch, copy=is_copied, observation_mode=mode)
    settings["copy"] = is_copied
    settings["num_envs"] = batch.num_envs
    settings["observation_mode"] = None if mode == "same" else mode
    settings["autoreset_mode"] = envs.autoreset_mode.value
    # Gymnasium imports `envserve.gym` only when it uses this entry point. The import
    # changes the registry; see that module's docstring.
    name = batch.spec.env_name if isinstance(env, str) else env
    envs.spec = _spec_of(name, settings, vector_entry_point=f"envserve.gym:{name}")
    return envs


def make(
    env: EnvLike | None = None,
    address: str | None = None,
    *,
    max_episode_steps: int | None = None,
    disable_env_checker: bool | None = None,
    render_mode: str | None = None,
    **options: Unpack[Options],
) -> Env:
    """Make one env, like `gymnasium.make`.

    Args:
      env: Registered name, like "HalfCheetah-v5", a spec, or your env; see
        `BatchEnv.local`.
      address: Address of a server, like "sim1"; by default, the env runs in a worker
        process on this host.
      max_episode_steps: See `make_vec`.
      disable_env_checker: Accepted for `gymnasium.make`; without effect, because
        workers check the values that envs return.
      render_mode: See `gymnasium.make`.
      **options: See `make_vec`.

    Raises:
      EnvserveError: See `make_vec`.
    """
    if isinstance(address, int):  # the second argument of `gymnasium.make`
        address, max_episode_steps = None, address
    settings: dict[str, Any] = {
        **options,
        "address": address,
        "max_episode_steps": max_episode_steps,
        "render_mode": render_mode,
    }
    env = _separate_env_kwargs(env, settings, make)
    if several := settings.keys() & {"num_envs", "addresses"}:
        raise TypeError(
            f"{min(several)}: expected no value, because `make` makes one env; pass "
            f"the server's address as `address`, or call `make_vec`"
        )
    address = settings.pop("address")
    if not isinstance(address, str | None):
        raise TypeError(
            f"address: expected one address, like 'sim1'; got {address!r:.200}; to use "
            f"several servers, call `make_vec`"
        )
    addresses = None if address is None else [address]
    expected = "no value, because the caller resets the env"
    fixed = {"autoreset": "disabled"}
    all_options = {**settings, "actions": settings.get("actions") or "pass"}
    mode = settings["render_mode"]
    is_collected = str(mode).endswith("_list") and not _renders_only_lists(env, mode)
    if is_collected:
        all_options["render_mode"] = mode.removesuffix("_list")
    batch = make_batch(env, 1, addresses, fixed, expected, **all_options)
    result = Env(batch)
    name = batch.spec.env_name if isinstance(env, str) else env
    settings["address"] = address
    if isinstance(env, str):
        settings["env"] = name
    result.spec = _spec_of(name, settings, entry_point="envserve:make")
    env_kwargs: Any = settings.get("env_kwargs") or {}
    (env_kwargs,) = (env_kwargs,) if isinstance(env_kwargs, Mapping) else env_kwargs
    limit = env_kwargs.get("max_episode_steps")
    if result.spec is not None and limit is not None:
        result.spec.max_episode_steps = limit if limit > 0 else None
    if is_collected:
        # If the worker collected the frames, they would not fit into one message.
        collection: Any = gymnasium.wrappers.RenderCollection(result)
        result = collection
    return result


def _separate_env_kwargs(
    env: EnvLike | None, options: dict[str, Any], function: Callable[..., Any]
) -> EnvLike:
    """Move the arguments of the env from `options` to `env_kwargs`; return the env.

    If the env is a list of functions, its arguments become `vector_kwargs`, as in
    Gymnasium. If the env is a spec that `make` or `make_vec` has created, the options
    in the spec replace those in `options`.

    Args:
      env: The env, or None if `options` contains it under Gymnasium's names.
      options: Options and arguments of the env; changed in place.
      function: The called function, `make` or `make_vec`.

    Raises:
      TypeError: There is no env, or a keyword is probably a misspelt option.
    """
    for name in ("id", "env_fns"):  # named as in Gymnasium
        env = options.pop(name, None) if env is None else env
    # An option that only `make_vec` has is not an argument of the env: if `make` was
    # called, `make_batch` rejects the option.
    parameters = (*signature(make_vec).parameters, *signature(function).parameters)
    known = {*parameters, *Options.__annotations__} - {"options"}
    if isinstance(env, EnvSpec):
        has_options = env.entry_point == "envserve:make" or str(
            env.vector_entry_point
        ).startswith("envserve.gym:")
        option_names = env.kwargs.keys() if has_options else env.kwargs.keys() & known
        options |= {name: env.kwargs[name] for name in option_names}
        kwargs = {key: env.kwargs[key] for key in env.kwargs.keys() - option_names}
        if options.get("vectorization_mode") in ("sync", "async"):
            # The mode usually comes from the spec: do not warn that it has no effect.
            options["vectorization_mode"] = None
        env = options.pop("env", env.id) if has_options else replace(env, kwargs=kwargs)
    if env is None:
        raise TypeError("env: expected the name of an env, or a function; got None")
    added = {name: options.pop(name) for name in options.keys() - known}
    for name in added:
        variants = {f"num_{name}", name.removesuffix("_seconds")} & known
        matches = [*variants, *difflib.get_close_matches(name, known, 1, cutoff=0.85)]
        if matches and name not in _arguments_of(env):
            raise TypeError(
                f"unknown option {name!r}; did you mean {matches[0]}? Pass it in "
                f"env_kwargs if it is an argument of the env"
            )
    if not isinstance(env, str) and isinstance(env, Sequence):
        options["vector_kwargs"] = {**(options.get("vector_kwargs") or {}), **added}
        added = {}
    if (limit := options.pop("max_episode_steps")) is not None:
        added["max_episode_steps"] = limit
    if added:
        _add_kwargs(options, added)
    return env


def _add_kwargs(settings: dict[str, Any], added: Mapping[str, Any]) -> None:
    """Add arguments of the envs to `env_kwargs`."""
    previous: Any = settings.get("env_kwargs") or {}
    if isinstance(previous, Mapping):
        settings["env_kwargs"] = {**previous, **added}
    else:  # a list with the arguments of each env
        settings["env_kwargs"] = [{**kwargs, **added} for kwargs in previous]


def _arguments_of(env: EnvLike) -> Collection[str]:
    """Return the argument names of an env's constructor; empty if it is unknown."""
    creator = _creator_of(env)
    return arguments_of(creator) if callable(creator) else ()


def _renders_only_lists(env: EnvLike, mode: str) -> bool:
    """Return whether an env has a render mode "..._list", but not the mode "..."."""
    metadata = None
    with contextlib.suppress(Exception):  # only the workers may be able to import it
        metadata = getattr(_creator_of(env), "metadata", None)
    modes = metadata.get("render_modes") if isinstance(metadata, Mapping) else None
    return mode in (modes or ()) and mode.removesuffix("_list") not in (modes or ())


def _creator_of(env: EnvLike) -> Any:
    """Return the class or function that creates an env; None if it is unknown."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else env
    return env_creator_of(spec) if isinstance(spec, EnvSpec) else spec


def _autoreset_of(mode: object) -> Autoreset:
    for name, member in AUTORESET_MODES.items():
        if mode in (name, member, member.value):
            return name
    raise ValueError(f"autoreset_mode: expected {_AUTORESET_CHOICES}; got {mode!r}")


def _apply_gymnasium_options(settings: dict[str, Any]) -> None:
    """Replace the options of Gymnasium's vector envs with those of envserve."""
    if (mode := settings.pop("vectorization_mode")) is not None:
        if mode not in [*VectorizeMode, *(member.value for member in VectorizeMode)]:
            raise ValueError(
                f"vectorization_mode: expected 'vector_entry_point', or no value, "
                f"because envserve runs envs in worker processes; got {mode!r}"
            )
        if VectorizeMode(mode) is VectorizeMode.VECTOR_ENTRY_POINT:
            settings["vectorized"] = True
        else:
            warnings.warn(
                f"vectorization_mode={VectorizeMode(mode).value!r} has no effect: "
                f"envserve runs envs in worker processes; omit it",
                stacklevel=3,
            )
    for name, value in (settings.pop("vector_kwargs") or {}).items():
        if name in ("autoreset_mode", "copy", "observation_mode"):
            settings[name] = value
        elif name not in _WITHOUT_EFFECT and value is not None:
            raise TypeError(
                f"vector_kwargs: expected autoreset_mode, copy, observation_mode, "
                f"{', '.join(_WITHOUT_EFFECT)}; got {name}={value!r:.200}"
            )


def make_batch(
    env: EnvLike,
    num_envs: int | None,
    addresses: Sequence[str] | None,
    fixed: Mapping[str, Any],
    expected: str = "no value, because the trainer determines it",
    *,
    num_workers: int | None = None,
    render_mode: str | None = None,
    **options: Any,
) -> BatchEnv:
    """Make a batch for trainers that do not support padding; see `make_vec`.

    The defaults differ from those of `BatchEnv`: steps wait for absent envs, return the
    infos of all rows and do not check for NaN and infinity, and envs are seeded only if
    a root seed is given. The user must not set the options in `fixed`; the error about
    such an option names the `expected` value.

    Raises:
      TypeError: The user has set one of the `fixed` options.
      ValueError: `num_workers` is set for envs on servers.
    """
    for name in sorted(options.keys() & {*fixed, "autoreset_mode"}):
        raise TypeError(f"{name}: expected {expected}; got {name}={options[name]!r}")
    settings: dict[str, Any] = {"infos": "all", "nonfinite": "pass"}
    settings |= {"padding_after": math.inf, "seeded": options.get("seed") is not None}
    # None means the default, except that it disables crash files.
    settings |= {k: v for k, v in options.items() if v is not None or k == "crash_dir"}
    settings |= fixed
    if render_mode is not None:
        _add_kwargs(settings, {"render_mode": render_mode})
    if addresses is None:
        return BatchEnv.local(env, num_envs, num_workers, **settings)
    if num_workers is None:
        num_envs = 1 if num_envs is None else num_envs
        return BatchEnv.connect(env, addresses, num_envs, **settings)
    raise ValueError(
        "num_workers: expected None if addresses are given, because each server sets "
        f"it (envserve start --workers); got {num_workers}"
    )


def _spec_of(env: EnvLike, kwargs: Mapping[str, Any], **changes: Any) -> EnvSpec | None:
    """Return a spec that recreates the env; None if this process has no spec of it."""
    spec = gymnasium.registry.get(env) if isinstance(env, str) else env
    if not isinstance(spec, EnvSpec):
        return None
    # Check the type of a value before its length: comparing a NumPy number with ()
    # returns an empty array, which has no truth value.
    changes["kwargs"] = {
        k: v for k, v in kwargs.items() if v is not None and (type(v) is not tuple or v)
    }
    changes["additional_wrappers"] = ()  # workers apply those of the registered spec
    if spec is env:  # keep its entry point: the spec's name may not be registered
        changes = {"kwargs": {**spec.kwargs, **changes["kwargs"]}}
    return replace(copying.deepcopy(spec), **changes)
