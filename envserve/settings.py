"""Settings of envs and of their hosts, validated on creation.

A client sends an `EnvRequest`. `HostSettings` contains the limits and permissions of a
host, and `PoolSettings` combines both for one worker pool. Annotations contain the
bounds of the fields. An invalid value raises a ValueError with the setting's name, the
expected value and the actual value.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
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

from envserve.address import complete_bind
from envserve.envs.context import EnvContext
from envserve.envs.user_envs import env_name_of, is_user_env, with_absolute_path
from envserve.host_resources import num_cores
from envserve.text import Name
from envserve.wrappers.specs import WrapperLike, Wrappers

Type = TypeVar("Type")

_EXPOSE: Final = r"^((call|get|set):)?[a-z][a-z0-9_]{0,63}$"
_NUMBER: Final = r"-?\d+(\.\d+)?"
_KWARG: Final = (
    rf"^[A-Za-z_]\w{{0,63}}(:(any|bool|int(\[-?\d+,-?\d+\])?|"
    rf"float(\[{_NUMBER},{_NUMBER}\])?|[^\s,|\[\]]+(\|[^\s,|\[\]]+)*))?$"
)
#: An attribute that clients may get, set or call; see
#: `session.server.permissions.check_call`.
ExposeRule = Annotated[str, Meta(pattern=_EXPOSE)]
#: A constructor argument that clients may set, and its allowed values; see
#: `session.server.permissions.check_kwargs`.
KwargRule = Annotated[str, Meta(pattern=_KWARG)]

#: Maps msgspec's names of types to descriptions for error messages.
_TYPE_DESCRIPTIONS: Final = {
    f"`str` matching regex {_EXPOSE!r}": (
        "NAME, get:NAME, set:NAME or call:NAME, where NAME has lower-case letters, "
        "digits and underscores and begins with a letter"
    ),
    f"`str` matching regex {_KWARG!r}": (
        "NAME, NAME:int[0,10], NAME:float[0,1], NAME:bool, NAME:a|b or NAME:any"
    ),
    "`int`": "an int",
    "`int | null`": "an int or None",
    "`float`": "a number",
    "`bool`": "a bool (true or false)",
    "`str`": "a str",
    "`str | null`": "a str or None",
    "`array`": "a list",
    "`array | null`": "a list or None",
    "`object`": "a map",
    "`object | array`": "a map, or a list with a map per env",
}

#: Keyword arguments of all envs, or of each env.
EnvKwargs = Mapping[str, Any] | list[Mapping[str, Any]]
#: Mode in which envs are reset after the end of an episode, as in Gymnasium.
Autoreset = Literal["same_step", "next_step", "disabled"]
#: Rows whose info dicts are returned: all, those whose episode ended, or none.
Infos = Literal["all", "episode_end", "none"]
#: Handling of NaN and infinity in observations and rewards: raise `EnvError`, mark the
#: row as lost (`valid` is False), or pass them to the caller.
NonFinite = Literal["raise", "mask", "pass"]
#: Handling of finite actions outside the action space: pass them to the env, clip them
#: to the bounds of a Box, or raise `ActionError` unless the difference is a rounding
#: error.
ActionMode = Literal["pass", "clip", "check"]
#: Whether the observation spaces of all envs are equal, or may have different bounds.
ObservationMode = Literal["same", "different"]

#: The limit keeps sizes in MiB below 2**63 bytes.
_MAX_COUNT: Final = 1 << 32
_Count = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
_CountOrZero = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
_U32 = Annotated[int, Meta(ge=0, lt=2**32)]
_Seconds = Annotated[float, Meta(gt=0)]


def convert(value: Any, kind: type[Type], *, is_strict: bool = True) -> Type:
    """Convert a plain value to a type, and check its annotated bounds.

    Args:
      value: Value made of plain types, as parsed from JSON.
      kind: Target type.
      is_strict: Whether strings are accepted only where a str is expected. If False,
        "3" can also become a number, and a string can become an instance of a class
        such as Path.

    Raises:
      ValueError: The value is invalid. The message contains the expected type and the
        position within the value.
    """
    construct = None if is_strict else lambda type_, text: type_(text)
    try:
        return msgspec.convert(value, kind, strict=is_strict, dec_hook=construct)
    except msgspec.ValidationError as error:
        if not is_strict and re.fullmatch(r"-?(\.\d+|\d+\.)", str(value)):
            return convert(float(value), kind)  # msgspec rejects ".5" and "5."
        text = str(error)
        for name, description in _TYPE_DESCRIPTIONS.items():
            text = text.replace(name, description)
        raise ValueError(text[0].lower() + text[1:]) from None
    except AttributeError:  # msgspec bug: an array where a map is expected
        raise ValueError("expected a map, got an array") from None


def check_ranges(rules: Iterable[KwargRule]) -> None:
    """Raise ValueError if a rule has an empty range."""
    for rule in rules:
        low, comma, high = rule.partition("[")[2].rstrip("]").partition(",")
        if comma and float(low) > float(high):
            raise ValueError(
                f"expected a range [low,high] with low <= high; got {rule!r:.200}"
            )


def convert_field(name: str, value: Any, hint: Any, *, is_strict: bool = True) -> Any:
    """Return the value of a field, converted to its annotated type.

    Raises:
      ValueError: The value is invalid. The message contains the name, the expected
        type and the value.
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
      The error message of `convert_field` for each invalid field.
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
    """Return a dict from field name to docstring, for a class and its bases."""
    docs, bases = {}, {(base.__module__, base.__name__) for base in kind.__mro__[:-1]}
    for module in {module for module, _ in bases} - {"builtins"}:
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
        """Convert and validate all fields; raise ValueError if one is invalid."""
        for error in convert_fields(self)[:1]:
            raise ValueError(error)


_hints_of: Final = cache(partial(get_type_hints, include_extras=True))
Settings = TypeVar("Settings", bound=_Validated)


def copy_as(kind: type[Settings], settings: Any, **changes: Any) -> Settings:
    """Return a copy of valid settings, without validating them again.

    Args:
      kind: Type of the copy. Fields that it does not have are omitted.
      settings: The settings, with at least the fields of `kind`.
      **changes: Valid values of fields that differ.
    """
    copied, values = object.__new__(kind), vars(settings) | changes
    vars(copied).update({name: values[name] for name in _hints_of(cast(Any, kind))})
    return copied


@dataclass(frozen=True, kw_only=True)
class EnvRequest(_Validated):
    """Request for identical envs, one per row of a batch.

    `BatchEnv.local` describes the fields that have no description here.
    """

    env_name: Name
    """Registered name, like "HalfCheetah-v5"."""
    num_envs: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Number of rows."""
    num_splits: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    blocks_per_split: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    """Number of blocks per split, regardless of the number of workers; 0 means one per
    worker."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    seeded: bool = True
    first_env_index: _U32 = 0
    num_batch_envs: _U32 = 0
    """Number of rows of the whole batch; 0 if it ends with the rows of this request."""
    first_incarnation: _U32 = 0
    """Number of times that each env was built before, on any host."""
    env_kwargs: EnvKwargs = field(default_factory=dict)
    wrappers: Wrappers = ()
    autoreset: Autoreset = "same_step"
    infos: Infos = "episode_end"
    spare_envs: bool = False
    nonfinite: NonFinite = "raise"
    strict_spaces: bool = False
    vectorized: bool = False
    actions: ActionMode = "check"
    observation_mode: ObservationMode = "same"

    def __post_init__(self) -> None:
        """Validate all fields; a list of `env_kwargs` must have one map per env."""
        super().__post_init__()
        env_kwargs = self.env_kwargs
        if not isinstance(env_kwargs, Mapping) and len(env_kwargs) != self.num_envs:
            raise ValueError(
                f"env_kwargs: expected one map, or one for each of the {self.num_envs} "
                f"envs; got {len(env_kwargs)}"
            )

    def kwargs_of(self, row: int) -> Mapping[str, Any]:
        """Return the keyword arguments of a row's env, with unreplaced placeholders."""
        env_kwargs = self.env_kwargs
        return env_kwargs if isinstance(env_kwargs, Mapping) else env_kwargs[row]

    def context_of(self, row: int, worker: int = 0, num_workers: int = 1) -> EnvContext:
        """Return the place of a row's env in its batch, on one of `num_workers`."""
        first = self.first_env_index
        num_envs = self.num_batch_envs or first + self.num_envs
        return EnvContext(first + row, num_envs, worker, num_workers)

    @property
    def num_hosted(self) -> int:
        """The number of envs on the host, including spare envs."""
        return 2 * self.num_envs if self.spare_envs else self.num_envs


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(_Validated):
    """The number of a host's workers, and their limits.

    The docstrings below the fields are also help texts of `envserve start` options.
    """

    num_workers: _Count = field(default_factory=num_cores)
    """Maximum number of worker processes for one client; by default, one per core."""
    import_modules: tuple[str, ...] = ()
    """Module or Python file that registers envs or wrappers; repeatable."""
    # The docstring describes False, because it is the help text of --no-preload.
    preload: bool = True
    """Import the env modules in each worker, instead of once in the process from which
    workers are forked. Workers start more slowly, but modules may start threads or use
    a GPU when they are imported; see "What forking means for envs" in the docs."""
    gpus: tuple[int | str, ...] = ()
    """GPU for a worker, as in CUDA_VISIBLE_DEVICES; repeatable. Worker i uses the GPU
    with index i modulo the number of GPUs. By default, workers see all GPUs."""
    step_timeout_seconds: _Seconds = 30.0
    """Step timeout of one env in seconds, after which its worker is killed."""
    reset_timeout_seconds: _Seconds = 120.0
    """Timeout in seconds for building an env, for its first step (which may compile
    code) and for a reset. After that, the env's worker is killed."""
    max_restarts: _CountOrZero = 5
    """Maximum number of consecutive restarts of a worker without a valid step of the
    failing env; after that, the env's error is raised."""
    max_row_mib: _CountOrZero | None = None
    """Maximum shared memory for all rows of one user in MiB; by default, unlimited."""
    max_infos_kib: Annotated[int, Meta(ge=1, le=1 << 15)] = 64
    """Maximum size of a row's infos in KiB; if they are larger, the keys with the
    largest values are omitted."""
    crash_dir: str | None = ""
    """Directory for crash repro files, or 'none' to disable them; by default, a
    directory of this user in the system's temporary directory."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(WorkerSettings):
    """Permissions and limits that a host sets for its clients.

    Requests for envs, arguments and attributes that are not allowed here are rejected.
    The docstring below each field is also the help text of its `envserve start` option.
    """

    envs_per_worker: _Count = 64
    """Number of envs per worker process. All clients together can lease this number
    times --workers."""
    env_names: tuple[str, ...] | None = None
    """Env to offer, specified like the ENV argument; repeatable. By default, all
    registered envs are offered."""
    vector_envs: tuple[str, ...] = ()
    """Env to run as a vector env, created by its vector_entry_point, so that a worker
    steps all its rows in one call; repeatable. Other envs are run as vector envs only
    for clients that request it."""
    binds: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp://127.0.0.1:5555",)
    """Address to listen on: HOST, HOST:PORT or tcp://HOST:PORT, where port 0 selects a
    free port, or ipc://PATH; repeatable."""
    exposed: frozenset[ExposeRule] = frozenset()
    """Env attribute that clients may access: NAME allows getting and calling it;
    get:NAME, set:NAME or call:NAME allows one kind of access. Repeatable."""
    allowed_kwargs: frozenset[KwargRule] = frozenset()
    """Constructor argument that clients may set: NAME allows numbers and bools;
    NAME:int[0,10], NAME:float[0,1], NAME:bool or 'NAME:a|b' allows only these values;
    NAME:any allows all values, including paths. Repeatable."""
    max_processes: _Count | None = None
    """Maximum number of worker processes for all clients together, raised to --workers
    if it is lower; by default, four per core, or four times --workers if that is more.
    The limit of one key is three quarters of these processes, but at least
    --workers."""
    lease_seconds: Annotated[float, Meta(gt=0, lt=2.0**63)] = 60.0
    """Seconds without a message from a client after which its lease expires and its
    envs are released."""
    # Stopping takes up to 2 s more, and Docker kills a container 10 s after SIGTERM.
    # Clients accept less than 2**63 milliseconds.
    drain_grace_seconds: Annotated[float, Meta(ge=0, lt=2.0**53)] = 8.0
    """Seconds after SIGTERM during which running episodes may finish."""
    max_message_mib: _Count = 1
    """Maximum size of a message from a client in MiB."""
    max_unread_mib: _Count = 64
    """Maximum size in MiB of all large replies that one user has not read yet. Further
    large replies are dropped, except one per block."""
    max_total_unread_mib: _Count = 256
    """Maximum size in MiB of all large replies that all users together have not read
    yet. Further large replies are dropped, except one per block."""
    debug_errors: bool = False
    """Include this host's file paths in the tracebacks that clients receive."""
    worker_env: tuple[str, ...] | None = None
    """Environment variable to pass to workers; repeatable. By default, all variables
    are passed, except those that begin with ENVSERVE_."""
    worker_user: str = ""
    """User that workers run as; by default, the server's user. If it is set, the server
    must be started by root."""
    worker_memory_mib: _CountOrZero = 0
    """Maximum address space of one worker in MiB; 0 means unlimited."""
    worker_processes: _CountOrZero = 0
    """Maximum number of processes and threads of the user that workers run as; 0 means
    unlimited."""
    max_buffered_mib: _Count = 256
    """Maximum growth of the server's memory by buffered messages in MiB; beyond that,
    the server closes all connections, and clients reconnect."""
    audit: str | None = None
    """File of the audit log, which gets one JSON line for each start and end of a
    lease, rejection, new key and revoked key; only the server's user can read it."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """HTTP port for Prometheus metrics, which can be read without a key; 0 selects a
    free port. By default, metrics are disabled."""
    metrics_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address to serve metrics on; by default, only this host can read them."""
    insecure_no_auth: bool = False
    """Use TCP without keys: anyone who can reach an address can use the server, and
    read and change its traffic."""

    def __post_init__(self) -> None:
        """Validate all fields, and add the offered user envs to `import_modules`."""
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
        try:
            vars(self)["binds"] = tuple(map(complete_bind, self.binds))
        except ValueError as error:
            raise ValueError(f"binds: {error}") from None
        # `expanduser` returns the path unchanged if there is no such user, and ignores
        # the part of a name that follows a slash.
        home = os.path.expanduser(f"~{self.worker_user}")
        is_unknown = home.startswith("~") or "/" in self.worker_user
        if self.worker_user and (is_unknown or os.geteuid() != 0):
            raise ValueError(
                f"worker_user: expected a user of this host, and a server started by "
                f"root; got {self.worker_user!r} and uid {os.geteuid()}"
            )

    @property
    def total_envs(self) -> int:
        """The maximum total number of envs in all leases; WELCOME sends it as u32."""
        return min(self.num_workers * self.envs_per_worker, 2**32 - 1)

    @property
    def total_processes(self) -> int:
        """The maximum total number of worker processes of all leases."""
        default = 4 * max(num_cores(), self.num_workers)
        return max(self.max_processes or default, self.num_workers)

    @property
    def max_message_bytes(self) -> int:
        """The maximum size of a frame from a client in bytes."""
        return self.max_message_mib << 20


@dataclass(frozen=True, kw_only=True)
class PoolSettings(WorkerSettings, EnvRequest):
    """Settings of a pool: a client's request and the host's worker settings."""

    pickled_code: bytes = field(default=b"", repr=False)
    """Code of this process for its workers; see `envs.pickled_code`."""
    is_replayable: bool = True
    """Whether repro files contain everything that is needed to create the envs."""

    @classmethod
    def of(cls, request: EnvRequest, host: WorkerSettings) -> Self:
        """Combine a request with the settings of a host."""
        values = {f.name: getattr(request, f.name) for f in fields(EnvRequest)}
        values |= {f.name: getattr(host, f.name) for f in fields(WorkerSettings)}
        if isinstance(host, HostSettings) and request.env_name in map(
            env_name_of, host.vector_envs
        ):
            values["vectorized"] = True
        return cls(**values)


class EnvOptions(TypedDict, total=False):
    """Options of `BatchEnv.connect` that are fields of `EnvRequest`.

    `BatchEnv.local` describes these options.
    """

    seed: int | None
    seeded: bool
    first_env_index: int
    num_splits: int
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    wrappers: Sequence[WrapperLike]
    autoreset: Autoreset
    infos: Infos
    spare_envs: bool
    nonfinite: NonFinite
    strict_spaces: bool
    vectorized: bool
    actions: ActionMode
    observation_mode: ObservationMode | tuple[Any, Any]


class LocalOptions(EnvOptions, total=False):
    """Options of `BatchEnv.local`, which describes them."""

    import_modules: Sequence[str]
    preload: bool
    gpus: Sequence[int | str]
    step_timeout: float
    reset_timeout: float
    max_restarts: int
    max_infos_kib: int
    crash_dir: str | None
