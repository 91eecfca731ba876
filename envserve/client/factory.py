"""Start the lanes of a batch: a pool of worker processes, or envs of servers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from inspect import signature
from itertools import pairwise
from typing import Any, Final, Literal, TypeVar, get_args

from envserve.client.link.connection import NOWHERE, SharedContext
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.server_pool import ServerPool
from envserve.envs import user_envs
from envserve.envs.seeding import draw_root_seed
from envserve.errors import AddressError, ConnectError, EnvsBusy
from envserve.lane import Lane
from envserve.pool.pool import Pool
from envserve.session.client.liveness import Timeouts
from envserve.settings import (
    EnvOptions,
    EnvRequest,
    LocalOptions,
    PoolSettings,
)
from envserve.text import did_you_mean
from envserve.wrappers.specs import check_wrappers, parse_wrappers

Batch = TypeVar("Batch")

#: Name of an env, or the class or function that makes it.
EnvWord = str | Callable[..., Any]
#: Whether a failed env only gives an invalid row, or also raises EnvError.
OnFault = Literal["truncate", "raise"]
#: Whether a lost server raises ServerLost, or its rows are padding until one is found.
OnServerLost = Literal["raise", "pad"]

_LOGGER: Final = logging.getLogger(__name__)
_SECONDS: Final = "_seconds"


def local_settings(
    env_name: EnvWord,
    num_envs: int,
    num_workers: int | None,
    options: LocalOptions,
    function: Callable[..., Any],
) -> PoolSettings:
    """Return the settings of a pool; `function` is the one that got the options.

    Raises:
      TypeError, UnknownEnv, ValueError, WrapperError: As for `BatchEnv.local`.
    """
    modules = options.get("import_modules") or ()
    name, options["import_modules"] = user_envs.name_and_imports(env_name, modules)
    user_envs.check_files_exist(options["import_modules"])
    given = _settings_of(options, LocalOptions, function)
    if not options["import_modules"]:  # otherwise workers may know more wrappers
        check_wrappers(given["wrappers"])
    if num_workers is not None:
        given["num_workers"] = num_workers
    return PoolSettings(env_name=name, num_envs=num_envs, **given)


def start_pool(
    settings: PoolSettings,
    timeout_seconds: float,
    make: Callable[..., Batch],
) -> Batch:
    """Start a pool, and make a batch of it; close the pool if that fails."""
    with contextlib.ExitStack() as stack:
        pool = Pool(settings)
        stack.callback(pool.close)
        pool.finish_start(time.monotonic() + timeout_seconds)
        batch = make([pool], autoreset=settings.autoreset)
        stack.pop_all()
        return batch


def remote_request(
    env_name: EnvWord,
    num_envs: int,
    options: EnvOptions,
    function: Callable[..., Any],
) -> EnvRequest:
    """Return the request for all rows; `function` is the one that got the options."""
    given = _settings_of(options, EnvOptions, function)
    name = user_envs.env_name_of(env_name)
    return EnvRequest(env_name=name, num_envs=num_envs, **given)


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
    """Connect to servers at the same time, and make a batch; close it all on failure.

    A server that is missing gets a lane that waits for one, and that is like the lanes
    of the other servers.
    """
    deadline = time.monotonic() + timeout_seconds
    count = len(servers.addresses) if num_servers is None else num_servers
    addresses = servers.addresses[:count]
    least = len(addresses) if min_servers is None else min_servers
    _check_counts(request.num_envs, count, least, len(addresses))
    shares = _shares_of(request, count)
    context = SharedContext(count)

    def lane_at(place: int, like: Lane | None = None) -> RemoteLane:
        return RemoteLane(
            addresses[place] if like is None else NOWHERE,
            shares[place],
            timeouts,
            insecure=insecure,
            context=context,
            server_pool=servers if servers.has_alternatives else None,
            like=like,
        )

    with contextlib.ExitStack() as stack:
        lanes: list[RemoteLane] = []
        for place in range(len(addresses)):
            lanes.append(lane_at(place))
            stack.callback(lanes[-1].close)
        missing = list(range(len(addresses), count))
        for place, lane in enumerate(lanes):
            try:
                lane.finish_start(deadline)
            except (ConnectError, EnvsBusy) as error:
                missing.append(place)
                if count - len(missing) < least:
                    raise
                _LOGGER.warning("%s; its rows are padding until a server comes", error)
        ready = [lane for place, lane in enumerate(lanes) if place not in missing]
        like = max(ready, key=lambda lane: lane.num_envs)
        for place in sorted(missing):
            lanes[place : place + 1] = [late := lane_at(place, like)]
            stack.callback(late.close)
        batch = make(lanes, autoreset=request.autoreset)
        stack.pop_all()
        return batch


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError for a value that is not one of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected one of {get_args(choices)}; got {value!r}")


def _settings_of(
    options: Mapping[str, Any], known: Any, function: Callable[..., Any]
) -> dict[str, Any]:
    """Return options as fields of settings; draw a root seed if none is given."""
    for name in options.keys() - known.__annotations__:
        hint = did_you_mean(
            name, [*signature(function).parameters, *known.__annotations__]
        )
        if name in LocalOptions.__annotations__ or name == "num_workers":
            hint = "; servers have their own"
        raise TypeError(
            f"there is no option {name!r} here{hint}; arguments of the env belong into "
            f"env_kwargs"
        )
    names = {field.name for field in fields(PoolSettings)}
    given = {
        name + _SECONDS if name + _SECONDS in names else name: value
        for name, value in options.items()
        if value is not None or name == "crash_dir"
    }
    given["wrappers"] = parse_wrappers(given.get("wrappers", ()))
    given.setdefault("seed", draw_root_seed())
    return given


def _shares_of(whole: EnvRequest, num_servers: int) -> list[EnvRequest]:
    """Spreads envs evenly over servers."""
    edges = [i * whole.num_envs // num_servers for i in range(num_servers + 1)]
    first = whole.first_env_index
    return [
        replace(whole, num_envs=stop - start, first_env_index=first + start)
        for start, stop in pairwise(edges)
    ]


def _check_counts(num_envs: int, count: int, least: int, num_found: int) -> None:
    if not 1 <= count <= num_envs or not num_found:
        raise ValueError(
            f"expected at least one server, and an env for each; got "
            f"{count} servers and num_envs={num_envs}"
        )
    if least < 1:
        raise ValueError(f"min_servers: expected at least 1; got {least}")
    if least > num_found:  # which may change from one look to the next
        raise AddressError(
            f"min_servers: expected at most {num_found}, the servers that have an "
            f"address now; got {least}; ask for fewer, or name more servers"
        )
