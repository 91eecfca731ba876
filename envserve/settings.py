"""Every setting of envs and their hosts, said and checked once.

`EnvRequest` is what a client asks for, `HostSettings` what a host allows and limits,
`PoolSettings` what a pool is built from. Bounds stand in the types; who builds one of
these gets a ValueError that names the setting, what was expected, and what came.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from envserve.wrappers import Wrappers

__all__ = [
    "Autoreset",
    "EnvOptions",
    "EnvRequest",
    "HostSettings",
    "Infos",
    "LocalOptions",
    "Name",
    "PoolSettings",
    "WorkerSettings",
    "convert",
    "is_private",
    "num_cores",
]

Type = TypeVar("Type")

#: What msgspec's names of types are called here.
_WORDS: Final = {
    "int": "an int",
    "float": "a number",
    "bool": "a bool",
    "str": "a str",
    "str | null": "a str or None",
    "array": "a list",
    "array | null": "a list or None",
    "object": "a map",
}

#: When an ended episode's env is reset, as in Gymnasium's `AutoresetMode`.
Autoreset = Literal["same_step", "next_step", "disabled"]
#: Which info dicts are reported: of all rows, of rows whose episode ended, or none.
Infos = Literal["all", "episode_end", "none"]

Name = Annotated[str, Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=1)]
_U32 = Annotated[int, Meta(ge=0, lt=2**32)]
_Seconds = Annotated[float, Meta(gt=0)]


def convert(value: Any, kind: type[Type]) -> Type:
    """Brings a plain value to a type, within the bounds that are annotated.

    Raises:
      ValueError: It is not of that type; says what was expected, and where.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        for word, words in _WORDS.items():
            text = text.replace(f"`{word}`", words)
        raise ValueError(text[0].lower() + text[1:]) from None
    except AttributeError:  # msgspec takes an array for a map
        raise ValueError("expected no array where a map belongs") from None


class _Checked:
    def __post_init__(self) -> None:
        """Checks every field, and brings it to its type; raises ValueError."""
        kind: Any = type(self)
        for name, hint in _hints_of(kind).items():
            value = getattr(self, name)
            if getattr(value, "shape", None) == ():  # a number of NumPy's
                value = value.item()
            try:
                vars(self)[name] = convert(value, hint)
            except ValueError as error:
                text = re.sub(r", got .*?(?= - at |$)", "", str(error))
                if hint in (Autoreset, Infos):
                    text = f"expected one of {', '.join(get_args(hint))}"
                raise ValueError(f"{name}: {text}; got {value!r:.200}") from None


_hints_of: Final = cache(partial(get_type_hints, include_extras=True))


def num_cores() -> int:
    """Returns how many cores this process may use: fewer than all, where pinned."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class EnvRequest(_Checked):
    """What a client asks for: equal envs, one a row."""

    env_name: Name
    """Registered name, like "HalfCheetah-v5"."""
    num_envs: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Number of rows."""
    num_splits: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    """Groups of blocks that can be stepped apart."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Root seed, from which every env's seed follows; see `seeding.env_seed`."""
    first_env_index: _U32 = 0
    """Row of the first env in the whole batch, over all lanes."""
    first_incarnation: _U32 = 0
    """How often every env has been built before, here or elsewhere."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the env's constructor."""
    wrappers: Wrappers = ()
    """What each env is wrapped in, the innermost first."""
    autoreset: Autoreset = "same_step"
    """When an ended episode's env is reset, as in Gymnasium."""
    infos: Infos = "episode_end"
    """Which info dicts are reported."""
    spare_envs: bool = False
    """Whether each row has a second env that is reset while the first is stepped."""

    @property
    def num_hosted(self) -> int:
        """How many envs the host has to hold."""
        return 2 * self.num_envs if self.spare_envs else self.num_envs


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(_Checked):
    """What the workers of a host are, and what limits them."""

    num_workers: _Count = field(default_factory=num_cores)
    """Most worker processes that one client gets; by default one per core."""
    import_modules: tuple[str, ...] = ()
    """Module that registers envs or wrappers; repeatable."""
    step_timeout_seconds: _Seconds = 30.0
    """Seconds that one env's step may take; then its worker is killed."""
    reset_timeout_seconds: _Seconds = 120.0
    """Seconds that one env's reset or start may take."""
    max_restarts: Annotated[int, Meta(ge=0)] = 5
    """How often a worker that ends without a step in between is replaced, before its
    envs are given up."""
    crash_dir: str | None = ""
    """Folder for repro files of crashes, by default one of this user's under the
    system's temporary folder; 'none' for no files."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(WorkerSettings):
    """What a host allows its clients, and how it serves them.

    Envs, arguments and attributes that are not named here are refused. The lines below
    the fields are the help of `envserve start`.
    """

    envs_per_worker: _Count = 64
    """With --workers, how many envs all clients may have."""
    env_names: tuple[str, ...] | None = None
    """Env to offer; repeatable. By default, all registered."""
    binds: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp://127.0.0.1:5555",)
    """tcp://host:port or ipc://path; repeatable; port 0 is any."""
    exposed: frozenset[str] = frozenset()
    """Attribute that clients may get, set and call; repeatable."""
    allowed_kwargs: frozenset[str] = frozenset()
    """Env argument that clients may set; repeatable."""
    lease_seconds: Annotated[float, Meta(gt=0, lt=2.0**63)] = 60.0
    """Silence after which a client's envs are given up."""
    # What follows takes less than 2 s more, and whoever runs a container kills it
    # after 10 s by default.
    drain_grace_seconds: Annotated[float, Meta(ge=0, lt=2.0**63)] = 8.0
    """Seconds for running episodes to end in after SIGTERM."""
    max_message_mib: _Count = 1
    """Longest message accepted from a client."""
    allows_public_binds: bool = False
    """Allow addresses that other hosts can reach."""

    def __post_init__(self) -> None:
        """Checks everything; raises ValueError."""
        super().__post_init__()
        for address in self.binds:
            try:
                is_allowed = is_private(address) or self.allows_public_binds
            except ValueError as error:
                raise ValueError(f"binds: {error}") from None
            if not is_allowed:
                raise ValueError(
                    f"binds: other hosts can reach {address}, and clients are not "
                    f"authenticated; bind to tcp://127.0.0.1 or ipc://, or accept that "
                    f"by --insecure-no-auth"
                )

    @property
    def total_envs(self) -> int:
        """How many envs all leases may have together."""
        return self.num_workers * self.envs_per_worker

    @property
    def max_message_bytes(self) -> int:
        """Longest frame that is accepted from a client."""
        return self.max_message_mib << 20


@dataclass(frozen=True, kw_only=True)
class PoolSettings(WorkerSettings, EnvRequest):
    """What a pool is built from: what was asked for, on a host's workers."""

    @classmethod
    def of(cls, request: EnvRequest, host: WorkerSettings) -> Self:
        """Puts a request and a host's settings together."""
        asked = {f.name for f in fields(EnvRequest)}
        names = [f.name for f in fields(cls)]
        return cls(**{n: getattr(request if n in asked else host, n) for n in names})


class EnvOptions(TypedDict, total=False):
    """What `BatchEnv.connect` takes of `EnvRequest`, by the same names."""

    seed: int | None
    num_splits: int
    env_kwargs: Mapping[str, Any] | None
    wrappers: Sequence[Mapping[str, Any]]
    autoreset: Autoreset
    infos: Infos
    spare_envs: bool


class LocalOptions(EnvOptions, total=False):
    """What `BatchEnv.local` takes besides of `WorkerSettings`, timeouts in seconds."""

    import_modules: Sequence[str]
    step_timeout: float
    reset_timeout: float
    max_restarts: int
    crash_dir: str | None


def is_private(address: str) -> bool:
    """Tells whether only this host reaches an address.

    Args:
      address: Like "tcp://127.0.0.1:5555" or "ipc:///tmp/envs".

    Raises:
      ValueError: It is no such address.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return True
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdigit() and int(port) < 65536):
        raise ValueError(
            f"expected an address like tcp://127.0.0.1:5555 or ipc:///path; "
            f"got {address!r}"
        )
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, an interface or *: whatever that may reach
        return False
