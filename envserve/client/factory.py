"""How a batch is made: of worker processes here, or of envs of servers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, Protocol, Self, TypeVar, Unpack, get_args

from envserve.client.link.connection import NOWHERE, SharedContext
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.server_pool import Fleet
from envserve.envs import user_envs
from envserve.envs.seeding import draw_root_seed
from envserve.errors import AddressError, ConnectError, EnvsBusy
from envserve.lane import Lane
from envserve.pool.pool import Pool
from envserve.session.client.liveness import Timeouts
from envserve.settings import (
    Autoreset,
    EnvOptions,
    EnvRequest,
    LocalOptions,
    PoolSettings,
)
from envserve.text import did_you_mean
from envserve.wrappers.specs import check_wrappers, parse_wrappers

__all__ = ["Builders", "EnvWord", "OnFault", "OnServerLost"]

Batch = TypeVar("Batch")

#: An env's name, or the class or function that makes it.
EnvWord = str | Callable[..., Any]
#: What a failed env does besides giving an invalid row.
OnFault = Literal["truncate", "raise"]
#: What follows when a server was waited for in vain.
OnServerLost = Literal["raise", "pad"]

_LOGGER: Final = logging.getLogger(__name__)
_SECONDS: Final = "_seconds"


class Builders(Protocol):
    """The ways to make a batch, for `BatchEnv` to inherit."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        autoreset: Autoreset,
        on_fault: OnFault,
        padding_after: float,
    ) -> None:
        """Puts lanes together; see `BatchEnv`."""

    @classmethod
    def local(
        cls,
        env_name: EnvWord,
        num_envs: int,
        num_workers: int | None = None,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        start_timeout: float = 300.0,
        **options: Unpack[LocalOptions],
    ) -> Self:
        """Starts envs in worker processes of this host.

        Args:
          env_name: Registered name, like "HalfCheetah-v5"; or an own env, like
            "my_env.py:Walk", "my_package:Walk-v0", or a class or function that can be
            imported; see docs/own-envs.md.
          num_envs: Number of rows.
          num_workers: Processes to spread them over; by default one per core.
          on_fault: What a failed env does besides giving an invalid row.
          padding_after: Seconds that a step waits for envs that are not there: their
            worker is being replaced, or their server is silent. Then their rows come
            back with status PENDING, and the others go on; `math.inf` waits for as long
            as it takes. A batch of which nothing is alive waits in any case.
          start_timeout: Seconds until all envs must be built.
          **options: See `settings.LocalOptions`: seed, env_kwargs, wrappers and more.

        Raises:
          EnvStartError: The envs cannot be built; has the worker's traceback.
          TypeError: The env, the modules or an option are not what they should be.
          UnknownEnv: There is no such env, or workers cannot import it.
          ValueError: An option is out of bounds.
          WrapperError: A wrapper is not known, or an argument of it is wrong.
        """
        modules = options.get("import_modules") or ()
        name, options["import_modules"] = user_envs.name_and_imports(env_name, modules)
        user_envs.check_files(options["import_modules"])
        given = _settings_of(options, LocalOptions, on_fault)
        if not options.get("import_modules"):  # nobody else knows more of wrappers
            check_wrappers(given["wrappers"])
        if num_workers is not None:
            given["num_workers"] = num_workers
        settings = PoolSettings(env_name=name, num_envs=num_envs, **given)
        make = partial(
            cls,
            autoreset=settings.autoreset,
            on_fault=on_fault,
            padding_after=padding_after,
        )
        return _start(lambda place, like: Pool(settings), start_timeout, make)

    @classmethod
    def connect(
        cls,
        env_name: EnvWord,
        addresses: Sequence[str],
        num_envs: int,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        connect_timeout: float = 10.0,
        start_timeout: float = 300.0,
        server_lost_after: float = 60.0,
        on_server_lost: OnServerLost = "raise",
        num_servers: int | None = None,
        min_servers: int | None = None,
        insecure: bool = False,
        max_row_mib: int = Timeouts.max_row_mib,
        **options: Unpack[EnvOptions],
    ) -> Self:
        """Takes envs of servers, spread evenly over them.

        Args:
          env_name: Name of an env that every server offers; of an own one, what its
            servers were told: "my_env.py:Walk", which they call "my_env:Walk".
          addresses: Servers, like "sim1", "sim1:5555", "tcp://sim1:5555",
            "ipc:///tmp/envs"; or sources of them: "dns://sims:5555" for all addresses
            of a name, "file:///path", "ray://namespace/name". Rows whose server is gone
            move to another of these that has as many free envs; see docs/cluster.md.
          num_envs: Number of rows in all.
          on_fault: As for `local`.
          padding_after: As for `local`.
          connect_timeout: Seconds within which a server must answer at all.
          start_timeout: Seconds until all envs must be built.
          server_lost_after: Seconds to wait for a server that is silent, or was
            restarted. Meanwhile its rows are padding; envs anew cost an episode each.
          on_server_lost: What follows, if no other server has room: "raise" raises
            ServerLost; "pad" goes on with padding until a server has, or ServerLost if
            no row is alive.
          num_servers: How many servers to spread the envs over; by default as many as
            there are addresses now. There may be more of them later.
          min_servers: How many of these must be there to begin; by default all that
            have an address now. The rows of the others are padding until they come.
          insecure: Whether to use no keys on tcp, in a network that you trust.
          max_row_mib: Most memory for the rows of a server, who says how long they are.
          **options: See `settings.EnvOptions`. The same seed gives the same rows as
            `local`; servers take only `env_kwargs` and wrappers that they know.

        Raises:
          AddressError: There is no such address, nobody knows the host, or fewer than
            `min_servers` have an address.
          ConnectError: No server answers at an address, or its key is not known.
          KeyFileError: A file of keys cannot be read, or others can.
          EnvsBusy: A server has not enough free envs.
          RemoteProtocolError: A server breaks the protocol, or its rows are too long.
          UnknownEnv: A server does not offer the env.
          WrapperError: A server does not know a wrapper, or an argument is wrong.
        """
        _check_choice("on_server_lost", on_server_lost, OnServerLost)
        fleet = Fleet(addresses, insecure=insecure)
        count = len(fleet.first) if num_servers is None else num_servers
        servers = fleet.first[:count]
        least = len(servers) if min_servers is None else min_servers
        _check_counts(num_envs, count, least, len(servers))
        asked = _settings_of(options, EnvOptions, on_fault)
        name = user_envs.name_of(env_name)
        whole = EnvRequest(env_name=name, num_envs=num_envs, **asked)
        patience = Timeouts(
            connect_seconds=connect_timeout,
            lost_seconds=server_lost_after,
            pads=on_server_lost == "pad",
            max_row_mib=max_row_mib,
        )
        shares = _shares_of(whole, count)
        known: Any = {"insecure": insecure, "context": SharedContext(count)}
        known["fleet"] = fleet if fleet.has_choice else None

        def lane_at(place: int, like: Lane | None) -> RemoteLane:
            address = servers[place] if like is None else NOWHERE
            return RemoteLane(address, shares[place], patience, like=like, **known)

        make = partial(
            cls,
            autoreset=whole.autoreset,
            on_fault=on_fault,
            padding_after=padding_after,
        )
        return _start(lane_at, start_timeout, make, least, len(servers), count)


def _start(
    lane_at: Callable[[int, Lane | None], Lane],
    seconds: float,
    make: Callable[[Sequence[Lane]], Batch],
    least: int = 1,
    num_found: int = 1,
    count: int = 1,
) -> Batch:
    """Makes a batch of lanes, which start side by side; closes them if it fails.

    Of `count` lanes `num_found` have a server, and at least so many must begin. In the
    place of the others is one like those that have, which waits for a server.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        started: list[Lane] = []
        for place in range(num_found):
            started.append(lane_at(place, None))
            stack.callback(started[-1].close)
        missing = list(range(num_found, count))
        for place, lane in enumerate(started):
            try:
                lane.finish_start(deadline)
            except (ConnectError, EnvsBusy) as error:
                missing.append(place)
                if count - len(missing) < least:
                    raise
                _LOGGER.warning("%s; its rows are padding until a server comes", error)
        ready = [lane for place, lane in enumerate(started) if place not in missing]
        like = max(ready, key=lambda lane: lane.num_envs)
        for place in sorted(missing):
            started[place : place + 1] = [late := lane_at(place, like)]
            stack.callback(late.close)
        batch = make(started)
        stack.pop_all()
        return batch


def _settings_of(
    options: Mapping[str, Any], known: Any, on_fault: str
) -> dict[str, Any]:
    """Returns options as fields of settings; a root seed that is not given is drawn."""
    _check_choice("on_fault", on_fault, OnFault)
    for name in options.keys() - known.__annotations__:
        hint = did_you_mean(name, known.__annotations__)
        if name in LocalOptions.__annotations__:
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


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected one of {get_args(choices)}; got {value!r}")
