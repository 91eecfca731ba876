"""Start the lanes of a batch: a pool of worker processes, or lanes to servers."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from itertools import pairwise
from numbers import Real
from typing import Any, Final, Literal, TypeVar, get_args

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envserve.client.link.connection import NO_ADDRESS, SharedContext
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.server_pool import ServerPool, raise_file_limit_for
from envserve.envs import user_envs
from envserve.envs.pickled_code import UserCode
from envserve.envs.seeding import draw_root_seed
from envserve.errors import (
    AddressError,
    ConnectError,
    EnvsBusy,
    EnvStartError,
    UnknownEnv,
)
from envserve.lane import Lane
from envserve.pool.pool import Pool
from envserve.session.client.liveness import Timeouts
from envserve.settings import EnvOptions, EnvRequest, LocalOptions, PoolSettings
from envserve.text import nearest_name
from envserve.wrappers.specs import check_wrappers, parse_wrappers

Batch = TypeVar("Batch")

#: The name or spec of an env, a class or function that creates it, or one function for
#: each row.
EnvLike = str | EnvSpec | Callable[..., Any] | Sequence[Callable[[], Any]]
#: Whether a failed env only returns an invalid row, or also raises EnvError.
OnFault = Literal["truncate", "raise"]
#: Whether a lost server raises ServerLost, or its rows are padding until another server
#: is found.
OnServerLost = Literal["raise", "pad"]

_LOGGER: Final = logging.getLogger(__name__)
_SECONDS: Final = "_seconds"
#: Errors of a single server, after which the batch can start with the other servers.
_SERVER_ERRORS: Final = (ConnectError, EnvsBusy, EnvStartError, UnknownEnv)


def local_settings(
    env_name: EnvLike,
    num_envs: int | None,
    num_workers: int | None,
    options: LocalOptions,
    function: Callable[..., Any],
) -> PoolSettings:
    """Return the settings of a pool, from the arguments of `BatchEnv.local`.

    If an option is unknown, the error suggests the nearest parameter of `function`, the
    public function that received the options.

    Raises:
      TypeError, UnknownEnv, ValueError, WrapperError: See `BatchEnv.local`.
    """
    modules = options.get("import_modules") or ()
    reference, code = UserCode.of(env_name)
    name, options["import_modules"] = user_envs.name_and_imports(reference, modules)
    spec = code.specs.get(reference)
    if spec is not None and spec.entry_point is None:
        options.setdefault("vectorized", True)  # the env exists only as a vector env
    user_envs.check_files_exist(options["import_modules"])
    options["env_kwargs"] = code.take_kwargs(options.get("env_kwargs"))
    options["wrappers"] = code.name_wrappers(
        options.get("wrappers", ()), options["import_modules"]
    )
    settings = _checked_settings(options, LocalOptions, function)
    # Modules and pickled code may register wrappers. Only workers, which import them,
    # can check the arguments of these wrappers.
    if not (options["import_modules"] or code.wrappers):
        check_wrappers(settings["wrappers"])
    if num_workers is not None:
        settings["num_workers"] = num_workers
    if code.env_fns:
        _check_env_fns(code.env_fns, num_envs, settings)
    if num_envs is None:
        num_envs = len(code.env_fns) or 1
    is_complete = not (code.wrappers or any(code.kwargs))
    is_in_script = name in code.specs and user_envs.module_of(name) in ("", "__main__")
    is_importable = user_envs.is_file(reference) or user_envs.is_importable(name)
    settings["is_replayable"] = is_complete and is_importable and not is_in_script
    settings["pickled_code"] = code.dumps()
    try:
        return PoolSettings(env_name=name, num_envs=num_envs, **settings)
    except ValueError as error:  # names the field, such as step_timeout_seconds
        field, colon, text = str(error).partition(":")
        raise type(error)(field.removesuffix(_SECONDS) + colon + text) from None


def _check_env_fns(
    env_fns: Sequence[Callable[[], Any]], num_envs: int | None, settings: dict[str, Any]
) -> None:
    if num_envs not in (None, len(env_fns)):
        raise ValueError(
            f"num_envs: expected {len(env_fns)}, the number of functions, or no value; "
            f"got {num_envs}"
        )
    for name in ("env_kwargs", "vectorized"):
        if settings.get(name):
            raise ValueError(
                f"{name}: expected no value, because the given functions create the "
                f"envs; got {settings[name]!r:.200}"
            )


def start_pool(
    settings: PoolSettings, timeout_seconds: float, make: Callable[..., Batch]
) -> Batch:
    """Start a pool and return its batch; close the pool if an error occurs."""
    with contextlib.ExitStack() as stack:
        pool = Pool(settings)
        stack.callback(pool.close)
        pool.finish_start(time.monotonic() + timeout_seconds)
        batch = make([pool], **_modes(settings))
        stack.pop_all()
        return batch


def remote_request(
    env_name: EnvLike, num_envs: int, options: EnvOptions, function: Callable[..., Any]
) -> EnvRequest:
    """Return the request for all envs of a batch; see `local_settings`."""
    settings = _checked_settings(options, EnvOptions, function)
    name = remote_name(env_name)
    return EnvRequest(env_name=name, num_envs=num_envs, **settings)


def remote_name(env: EnvLike) -> str:
    """Return the name under which servers offer an env.

    Raises:
      TypeError, UnknownEnv: Servers cannot create this env.
    """
    if isinstance(env, Sequence) and not isinstance(env, str):
        if all(isinstance(element, str) for element in env):
            raise TypeError(
                f"expected the name of an env; got the list {list(env)}; if these are "
                "addresses, pass them after the name"
            )
        raise TypeError(
            "expected the name of an env that the servers offer; got a list of "
            "functions, which only workers of this host can run; start the servers "
            "with `envserve start my_env.py:make_env`, and pass that name"
        )
    if isinstance(env, EnvSpec):
        if env != gymnasium.registry.get(env.id):
            raise TypeError(
                f"expected a spec that equals the registered one, because the servers "
                f"use their own spec; got {env}; pass its name and env_kwargs"
            )
        return env.id
    return user_envs.env_name_of(env)


def start_remote(
    servers: ServerPool,
    request: EnvRequest,
    timeouts: Timeouts,
    timeout_seconds: float,
    make: Callable[..., Batch],
    *,
    num_servers: int | None,
    min_servers: int | None,
    insecure: bool,
) -> Batch:
    """Connect to all servers concurrently, and return a batch of their lanes.

    If `min_servers` allows it, some servers may be missing or unable to create the
    envs. The lanes of these servers are vacant: they have the spaces of the other lanes
    and wait for a server. If an error is raised, all lanes are closed.
    """
    deadline = time.monotonic() + timeout_seconds
    count = len(servers.addresses) if num_servers is None else num_servers
    addresses = servers.addresses[:count]
    min_ready = len(addresses) if min_servers is None else min_servers
    _check_counts(request.num_envs, count, min_ready, len(addresses))
    raise_file_limit_for(count)
    requests = _divide_request(request, count)
    context = SharedContext(count)

    def start_lane(index: int, like: Lane | None = None) -> RemoteLane:
        return RemoteLane(
            addresses[index] if like is None else NO_ADDRESS,
            requests[index],
            timeouts,
            insecure=insecure,
            context=context,
            # Several lanes may share the only server.
            server_pool=servers if servers.has_alternatives or count > 1 else None,
            like=like,
        )

    with contextlib.ExitStack() as stack:
        lanes: list[RemoteLane] = []
        stack.callback(close_lanes, lanes)
        for index in range(len(addresses)):
            lanes.append(start_lane(index))
        missing = list(range(len(addresses), count))
        for index, lane in enumerate(lanes):
            try:
                lane.finish_start(deadline)
            except _SERVER_ERRORS as error:
                missing.append(index)
                if count - len(missing) < min_ready:
                    raise
                last = str(error).splitlines()[-1]  # after the worker's traceback
                text = f"{lane.name}: {last.removeprefix(f'{lane.name}: ')}"
                _LOGGER.warning(
                    "%s; its rows are padding until a server is ready", text
                )
        ready = [lane for index, lane in enumerate(lanes) if index not in missing]
        like = max(ready, key=lambda lane: lane.num_envs)
        for index in sorted(missing):
            lanes[index : index + 1] = [start_lane(index, like)]
        batch = make(lanes, **_modes(request))
        stack.pop_all()
        return batch


def close_lanes(lanes: Iterable[Lane]) -> None:
    """Close lanes concurrently; if one cannot be closed, still close the others."""
    with contextlib.ExitStack() as stack:
        for lane in lanes:
            stack.callback(lane.close)
        for lane in lanes:
            lane.begin_close()


def _modes(request: EnvRequest) -> dict[str, Any]:
    """Return the settings that a batch shares with its lanes, by argument name."""
    names = ("autoreset", "actions", "observation_mode")
    return {name: getattr(request, name) for name in names}


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError unless a value is one of the choices of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected one of {get_args(choices)}; got {value!r}")


def check_positive(**limits: float) -> None:
    """Raise ValueError unless all values are positive numbers; infinity is allowed."""
    for name, value in limits.items():
        if not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{name}: expected a positive number; got {value!r:.200}")


def _checked_settings(
    options: Mapping[str, Any], known: Any, function: Callable[..., Any]
) -> dict[str, Any]:
    """Convert options to arguments of `PoolSettings` or `EnvRequest`.

    Without the option `seed`, draw a random root seed. Raise TypeError for an option
    that is not in `known`, a TypedDict of options.
    """
    accepted = [*signature(function).parameters, *known.__annotations__]
    local = *LocalOptions.__annotations__, "num_workers"
    on_server = [name for name in local if name not in accepted]
    for name in options.keys() - known.__annotations__:
        nearest = name if name in on_server else nearest_name(name, accepted)
        nearest = nearest or nearest_name(name, on_server)
        hint = f"did you mean {nearest}? Pass" if nearest else "pass"
        if nearest in on_server:
            hint = f"{nearest} is set on the server; pass"
        raise TypeError(
            f"unknown option {name!r}; {hint} the env's arguments in env_kwargs"
        )
    names = {field.name for field in fields(PoolSettings)}
    settings = {
        name + _SECONDS if name + _SECONDS in names else name: value
        for name, value in options.items()
        if value is not None or name == "crash_dir"
    }
    settings["wrappers"] = parse_wrappers(settings.get("wrappers", ()))
    # New workers need the same arguments, even if the caller changes them later.
    for name in settings.keys() & {"env_kwargs", "wrappers"}:
        with contextlib.suppress(Exception):  # invalid values raise a clear error later
            settings[name] = copy.deepcopy(settings[name])
    settings.setdefault("seed", draw_root_seed())
    return settings


def _divide_request(whole: EnvRequest, num_servers: int) -> list[EnvRequest]:
    """Divide a request evenly among servers; return one request per server."""
    edges = [i * whole.num_envs // num_servers for i in range(num_servers + 1)]
    first, kwargs = whole.first_env_index, whole.env_kwargs
    return [
        replace(
            whole,
            num_envs=stop - start,
            first_env_index=first + start,
            num_batch_envs=whole.num_batch_envs or first + whole.num_envs,
            env_kwargs=kwargs if isinstance(kwargs, Mapping) else kwargs[start:stop],
        )
        for start, stop in pairwise(edges)
    ]


def _check_counts(
    num_envs: int, num_servers: int, min_servers: int, num_found: int
) -> None:
    if not 1 <= num_servers <= num_envs or not num_found:
        raise ValueError(
            f"expected at least one server, and at least one env per server; got "
            f"{num_servers} servers and num_envs={num_envs}"
        )
    if min_servers < 1:
        raise ValueError(f"min_servers: expected at least 1; got {min_servers}")
    if min_servers > num_found:  # no ValueError: a later attempt may find more servers
        raise AddressError(
            f"min_servers: expected at most {num_found}, the number of servers that "
            f"have an address now; got {min_servers}; reduce it, or pass more addresses"
        )
