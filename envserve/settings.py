"""Settings of envs and of the hosts that run them, validated when they are created.

A client sends an `EnvRequest`; `HostSettings` are the limits and permissions of a host;
`PoolSettings` combine both for one pool of workers. Types are annotated with their
bounds. A value that does not fit raises a ValueError with the setting's name, the
expected value and the value that was found.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import pairwise
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from envserve.address import is_local_address
from envserve.envs.user_envs import env_name_of, is_user_env, with_absolute_path
from envserve.host_resources import num_cores
from envserve.text import Name
from envserve.wrappers.specs import Wrappers

Type = TypeVar("Type")

_EXPOSE: Final = r"^((call|get|set):)?[a-z][a-z0-9_]{0,63}$"
_NUMBER: Final = r"-?\d+(\.\d+)?"
_KWARG: Final = (
    rf"^[A-Za-z_]\w{{0,63}}(:(any|bool|int(\[-?\d+,-?\d+\])?|"
    rf"float(\[{_NUMBER},{_NUMBER}\])?|[^\s,|\[\]]+(\|[^\s,|\[\]]+)*))?$"
)
#: An attribute that clients may get, set or call; see
#: `session.server.policy.check_call`.
ExposeRule = Annotated[str, Meta(pattern=_EXPOSE)]
#: A constructor argument that clients may set, and its values; see
#: `session.server.policy.check_kwargs`.
KwargRule = Annotated[str, Meta(pattern=_KWARG)]

#: Names of types in error messages, by msgspec's name.
_TYPE_DESCRIPTIONS: Final = {
    f"`str` matching regex {_EXPOSE!r}": "NAME, get:NAME, set:NAME or call:NAME",
    f"`str` matching regex {_KWARG!r}": (
        "NAME, NAME:int[0,10], NAME:float[0,1], NAME:bool, NAME:a|b or NAME:any"
    ),
    "`int`": "an int",
    "`int | null`": "an int or None",
    "`float`": "a number",
    "`bool`": "a bool",
    "`str`": "a str",
    "`str | null`": "a str or None",
    "`array`": "a list",
    "`array | null`": "a list or None",
    "`object`": "a map",
}

#: When an env is reset after its episode has ended, as in Gymnasium's `AutoresetMode`.
Autoreset = Literal["same_step", "next_step", "disabled"]
#: Rows whose info dicts are reported: all, those whose episode ended, or none.
Infos = Literal["all", "episode_end", "none"]
#: Handling of NaN and infinity in observations and rewards: raise `EnvError`, mark the
#: row as lost (`valid` is False), or pass them to the caller.
NonFinite = Literal["raise", "mask", "pass"]

_Count = Annotated[int, Meta(ge=1)]
_U32 = Annotated[int, Meta(ge=0, lt=2**32)]
_Seconds = Annotated[float, Meta(gt=0)]


def convert(value: Any, kind: type[Type], *, is_strict: bool = True) -> Type:
    """Convert a plain value to a type, and check the annotated bounds.

    Args:
      value: Value of plain types, for example from JSON.
      kind: Type to convert it to.
      is_strict: Whether strings are only converted to strings. If False, "3" can become
        a number, and any string an instance of a class like Path.

    Raises:
      ValueError: The value does not fit; the message has the expected type and the
        position within the value.
    """
    construct = None if is_strict else lambda each, text: each(text)
    try:
        return msgspec.convert(value, kind, strict=is_strict, dec_hook=construct)
    except msgspec.ValidationError as error:
        text = str(error)
        for word, words in _TYPE_DESCRIPTIONS.items():
            text = text.replace(word, words)
        raise ValueError(text[0].lower() + text[1:]) from None
    except AttributeError:  # a bug of msgspec if it finds an array instead of a map
        raise ValueError("expected a map, got an array") from None


def check_ranges(rules: Iterable[KwargRule]) -> None:
    """Raise ValueError if the range of a rule is empty."""
    for rule in rules:
        low, comma, high = rule.partition("[")[2].rstrip("]").partition(",")
        if comma and float(low) > float(high):
            raise ValueError(f"expected a range from low to high; got {rule!r:.200}")


def convert_field(name: str, value: Any, hint: Any, *, is_strict: bool = True) -> Any:
    """Return the value of a field, converted to its annotated type.

    Raises:
      ValueError: The value does not fit; the message has the name, the expected type
        and the value.
    """
    try:
        return convert(value, hint, is_strict=is_strict)
    except ValueError as error:
        expected, _, where = str(error).partition(" - at ")
        expected = expected.partition(", got ")[0]
        if get_origin(hint) is Literal:
            expected = f"expected one of {', '.join(get_args(hint))}"
        if where.startswith("`key` in "):
            expected += " as a key"
        for meta in getattr(hint, "__metadata__", ()):
            if examples := getattr(meta, "examples", None):
                expected += f", such as {examples[0]}"
        index = where.rpartition("$")[2].rstrip("`")
        text = f"{name}{index}: {expected}; got {value!r:.200}"
        raise ValueError(text) from None


def convert_fields(settings: Any) -> list[str]:
    """Convert each field of a dataclass in place to its annotated type.

    Returns:
      The message of `convert_field` for each field that does not fit.
    """
    errors, kind = [], cast(Any, type(settings))
    for name, hint in _hints_of(kind).items():
        value = getattr(settings, name)
        if getattr(value, "shape", None) == ():  # a NumPy scalar
            value = value.item()
        try:
            vars(settings)[name] = convert_field(name, value, hint)
        except ValueError as error:
            errors.append(str(error))
    return errors


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by name."""
    docs, bases = {}, {(each.__module__, each.__name__) for each in kind.__mro__[:-1]}
    for module in {module for module, _ in bases}:
        for part in ast.parse(inspect.getsource(sys.modules[module])).body:
            is_base = (module, getattr(part, "name", "")) in bases
            for pair in pairwise(getattr(part, "body", ()) if is_base else ()):
                match pair:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        docs[name] = " ".join(text.split())
    return docs


class _Validated:
    def __post_init__(self) -> None:
        """Convert and validate all fields; raise ValueError for the first bad one."""
        for error in convert_fields(self)[:1]:
            raise ValueError(error)


_hints_of: Final = cache(partial(get_type_hints, include_extras=True))


@dataclass(frozen=True, kw_only=True)
class EnvRequest(_Validated):
    """Request for a number of equal envs, one for each row of a batch."""

    env_name: Name
    """Registered name, like "HalfCheetah-v5"."""
    num_envs: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Number of rows."""
    num_splits: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    """Number of groups of rows that can be stepped separately."""
    blocks_per_split: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    """Number of blocks per group, independent of the number of workers; 0 is one per
    worker."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Root seed, from which the seed of each env is derived; see `seeding.env_seed`."""
    seeded: bool = True
    """Whether the first reset of each env gets its seed; otherwise it gets None, as in
    Gymnasium."""
    first_env_index: _U32 = 0
    """Row of the first env in the whole batch, over all lanes."""
    first_incarnation: _U32 = 0
    """Number of times that every env was built before, on this host or another."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the env's constructor."""
    wrappers: Wrappers = ()
    """Wrappers of each env, the innermost first."""
    autoreset: Autoreset = "same_step"
    """When an env is reset after its episode has ended, as in Gymnasium."""
    infos: Infos = "episode_end"
    """Rows whose info dicts are reported."""
    spare_envs: bool = False
    """Whether each row has a second env, which is reset while the first is stepped."""
    nonfinite: NonFinite = "raise"
    """Handling of NaN and infinity in observations and rewards."""
    strict_spaces: bool = False
    """Whether observations must have exactly the dtypes of their space; otherwise they
    are cast."""
    vectorized: bool = False
    """Whether each block is one vector env, made by the env's vector_entry_point."""

    @property
    def num_hosted(self) -> int:
        """The number of envs on the host, spare envs included."""
        return 2 * self.num_envs if self.spare_envs else self.num_envs


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(_Validated):
    """Number and limits of a host's workers."""

    num_workers: _Count = field(default_factory=num_cores)
    """Maximum number of worker processes for one client; by default, one per core."""
    import_modules: tuple[str, ...] = ()
    """Module or Python file that registers envs or wrappers; repeatable."""
    step_timeout_seconds: _Seconds = 30.0
    """Seconds that a step of one env may take; after that, its worker is killed."""
    reset_timeout_seconds: _Seconds = 120.0
    """Seconds that building or resetting one env may take; after that, its worker is
    killed."""
    max_restarts: Annotated[int, Meta(ge=0)] = 5
    """Number of restarts of a failing worker in a row, without a successful step in
    between; after that, its envs are lost for good."""
    max_row_mib: Annotated[int, Meta(ge=0)] | None = None
    """Maximum MiB of shared memory for all rows of one user; by default, unlimited."""
    max_infos_kib: Annotated[int, Meta(ge=1, le=1 << 15)] = 64
    """Maximum KiB of infos per row; beyond that, the largest keys are left out."""
    crash_dir: str | None = ""
    """Folder for the repro files of crashes, or 'none' to write no files; by default, a
    folder of this user in the system's temporary folder."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(WorkerSettings):
    """Permissions and limits of the clients of a host.

    Envs, arguments and attributes that are not named here are refused. The docstring
    below each field is also the help text of its `envserve start` option.
    """

    envs_per_worker: _Count = 64
    """Number of envs per worker process: all clients together may lease this number
    times --workers."""
    env_names: tuple[str, ...] | None = None
    """Env to offer, in the forms of the ENV argument; repeatable. By default, all
    registered envs are offered."""
    vector_envs: tuple[str, ...] = ()
    """Env whose rows a worker steps in one call, through its vector_entry_point;
    repeatable. Other envs are stepped that way only for clients that request it."""
    binds: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp://127.0.0.1:5555",)
    """Address to listen on: tcp://HOST:PORT, where port 0 is any free port, or
    ipc://PATH; repeatable."""
    exposed: frozenset[ExposeRule] = frozenset()
    """Env attribute that clients may get and call, by its NAME; or one kind of access,
    as get:NAME, set:NAME or call:NAME; repeatable."""
    allowed_kwargs: frozenset[KwargRule] = frozenset()
    """Constructor argument that clients may set: NAME for numbers and bools,
    NAME:int[0,10], NAME:float[0,1], NAME:bool or 'NAME:a|b' for some values, NAME:any
    for all, including paths; repeatable."""
    max_processes: _Count = field(default_factory=lambda: 4 * num_cores())
    """Maximum number of worker processes of all clients, and at least --workers; by
    default, four per core. One key may use three quarters of them, or --workers if that
    is more."""
    lease_seconds: Annotated[float, Meta(gt=0, lt=2.0**63)] = 60.0
    """Seconds without a message from a client after which its lease expires and its
    envs are released."""
    # Stopping takes up to 2 s more, and Docker kills a container 10 s after SIGTERM.
    drain_grace_seconds: Annotated[float, Meta(ge=0, lt=2.0**63)] = 8.0
    """Seconds after SIGTERM in which running episodes may end."""
    max_message_mib: _Count = 1
    """Maximum MiB of one message from a client."""
    max_unread_mib: _Count = 64
    """Maximum MiB of large replies that wait for one user to read them; further ones
    are dropped, except the first of each block."""
    max_total_unread_mib: _Count = 256
    """Maximum MiB of large replies that wait for all users together to read them;
    further ones are dropped, except the first of each block."""
    debug_errors: bool = False
    """Include the paths of this host's files in tracebacks that clients get."""
    worker_env: tuple[str, ...] | None = None
    """Environment variable that is passed to workers; repeatable. By default, all
    variables except those that begin with ENVSERVE_."""
    worker_user: str = ""
    """User that workers run as; by default, the user of the server. Only root can start
    such a server."""
    worker_memory_mib: Annotated[int, Meta(ge=0)] = 0
    """Maximum MiB of address space of one worker; 0 is unlimited."""
    worker_processes: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of processes and threads of the user that workers run as; 0 is
    unlimited."""
    max_buffered_mib: _Count = 256
    """Maximum MiB by which buffered messages may grow the server's memory; beyond that,
    the server closes all connections, and clients connect again."""
    audit: str | None = None
    """File to append one JSON line to whenever a client is granted, refused or loses
    something; only the user of the server can read it."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Port on which Prometheus reads metrics over http, without a key; 0 is any free
    port. By default, there are no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address on which the metrics port listens; by default, only this host can reach
    it."""
    insecure_no_auth: bool = False
    """Use no keys on tcp: everyone who can reach an address can use the server, and
    read and change its traffic."""

    def __post_init__(self) -> None:
        """Validate all fields; add user envs to `import_modules`; raise ValueError."""
        super().__post_init__()
        names = tuple(map(with_absolute_path, self.env_names or ()))
        vector_names = map(with_absolute_path, self.vector_envs)
        user_envs = filter(is_user_env, (*names, *vector_names))
        modules = (*map(with_absolute_path, self.import_modules), *user_envs)
        vars(self)["env_names"] = names or self.env_names
        vars(self)["import_modules"] = tuple(dict.fromkeys(modules))
        try:
            check_ranges(self.allowed_kwargs)
        except ValueError as error:
            raise ValueError(f"allowed_kwargs: {error}") from None
        for address in self.binds:
            try:
                is_local_address(address)
            except ValueError as error:
                raise ValueError(f"binds: {error}") from None
        home = os.path.expanduser(f"~{self.worker_user}")  # unchanged without the user
        if self.worker_user and (home.startswith("~") or os.geteuid() != 0):
            raise ValueError(
                f"worker_user: expected a user of this host, and root to start the "
                f"server; got {self.worker_user!r} and uid {os.geteuid()}"
            )

    @property
    def total_envs(self) -> int:
        """The maximum number of envs of all leases together."""
        return self.num_workers * self.envs_per_worker

    @property
    def max_message_bytes(self) -> int:
        """The maximum bytes of a frame from a client."""
        return self.max_message_mib << 20


@dataclass(frozen=True, kw_only=True)
class PoolSettings(WorkerSettings, EnvRequest):
    """Settings of a pool: a client's request, and those of the host's workers."""

    @classmethod
    def of(cls, request: EnvRequest, host: WorkerSettings) -> Self:
        """Combine a request with the settings of a host."""
        requested = {f.name for f in fields(EnvRequest)}
        names = [f.name for f in fields(cls)]
        values = {n: getattr(request if n in requested else host, n) for n in names}
        if isinstance(host, HostSettings) and request.env_name in map(
            env_name_of, host.vector_envs
        ):
            values["vectorized"] = True
        return cls(**values)


class EnvOptions(TypedDict, total=False):
    """Keyword arguments of `BatchEnv.connect` that are fields of `EnvRequest`."""

    seed: int | None
    seeded: bool
    first_env_index: int
    num_splits: int
    env_kwargs: Mapping[str, Any] | None
    wrappers: Sequence[Mapping[str, Any]]
    autoreset: Autoreset
    infos: Infos
    spare_envs: bool
    nonfinite: NonFinite
    strict_spaces: bool
    vectorized: bool


class LocalOptions(EnvOptions, total=False):
    """Keyword arguments of `BatchEnv.local`, including those of `WorkerSettings`.

    Timeouts are in seconds.
    """

    import_modules: Sequence[str]
    step_timeout: float
    reset_timeout: float
    max_restarts: int
    max_infos_kib: int
    crash_dir: str | None
