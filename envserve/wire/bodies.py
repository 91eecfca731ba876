"""The bodies of control messages, as frozen dataclasses.

`encode` gives the msgpack map that stands in frame 0, `decode` checks every field of
one and raises RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from envserve import codec
from envserve.errors import RemoteProtocolError, WrapperError
from envserve.lane import Autoreset, Infos
from envserve.wire.constants import (
    MAX_ATTACH_BYTES,
    MAX_ENTRIES,
    MAX_NAME_LENGTH,
    MAX_NAMES,
    MIN_VERSION,
    VERSION,
)
from envserve.wire.fields import Fields
from envserve.wrappers import WrapperSpec, plain_wrappers, wrappers_from_plain

__all__ = [
    "Attach",
    "Building",
    "CallBody",
    "Drain",
    "Hello",
    "Pong",
    "ResetBody",
    "Welcome",
]

#: Rows of one lease.
_MAX_ENVS: Final = 1 << 16
_MAX_SEED: Final = 2**63 - 1
_U32: Final = 2**32 - 1

CallKind = Literal["call", "get", "set"]
_CALL_KINDS: Final[tuple[CallKind, ...]] = get_args(CallKind)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Opens a conversation.

    Attributes:
      min_version: Lowest protocol version that the client speaks.
      max_version: Highest.
      client: Who asks, for the server's log.
    """

    min_version: int = MIN_VERSION
    max_version: int = VERSION
    client: str = ""

    def encode(self) -> bytes:
        """Returns the body."""
        return codec.encode(vars(self))

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        """Reads a body."""
        fields = Fields.decode(body, "HELLO")
        return cls(
            min_version=fields.integer("min_version", 0, 255),
            max_version=fields.integer("max_version", 0, 255),
            client=fields.text("client", MAX_NAME_LENGTH, default=""),
        )


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What the server is and has.

    Attributes:
      min_version: Lowest protocol version that the server speaks.
      max_version: Highest.
      max_message_bytes: Longest frame that the server accepts.
      lease_seconds: Silence after which it gives a client's envs up.
      env_names: Names on offer, at most 1,000 of them.
      num_names: How many there are.
      total_envs: How many envs it can host at once.
      free_envs: How many of them nobody has leased.
      is_starting: Whether workers cannot be started yet.
      is_draining: Whether it gives out no envs any more, since it is about to stop.
      loop_lag_ms: How late its serving loop was lately, at worst.
    """

    min_version: int = MIN_VERSION
    max_version: int = VERSION
    max_message_bytes: int
    lease_seconds: float
    env_names: tuple[str, ...]
    num_names: int
    total_envs: int
    free_envs: int
    is_starting: bool = False
    is_draining: bool = False
    loop_lag_ms: int = 0

    def encode(self) -> bytes:
        """Returns the body."""
        fields = {**vars(self), "env_names": self.env_names[:MAX_NAMES]}
        for name in ("is_starting", "is_draining", "loop_lag_ms"):
            if not fields[name]:
                del fields[name]
        return codec.encode(fields)

    @classmethod
    def decode(cls, body: bytes) -> Welcome:
        """Reads a body."""
        fields = Fields.decode(body, "WELCOME")
        names = fields.items("env_names", MAX_NAMES)
        if not all(isinstance(name, str) for name in names):
            raise RemoteProtocolError("WELCOME.env_names: expected a list of str")
        return cls(
            min_version=fields.integer("min_version", 0, 255),
            max_version=fields.integer("max_version", 0, 255),
            max_message_bytes=fields.integer("max_message_bytes", 0, 2**63 - 1),
            lease_seconds=fields.number("lease_seconds"),
            env_names=tuple(names),
            num_names=fields.integer("num_names", 0, _U32),
            total_envs=fields.integer("total_envs", 0, _U32),
            free_envs=fields.integer("free_envs", 0, _U32),
            is_starting=fields.boolean("is_starting", default=False),
            is_draining=fields.boolean("is_draining", default=False),
            loop_lag_ms=fields.integer("loop_lag_ms", 0, _MAX_SEED, default=0),
        )


@dataclass(frozen=True, kw_only=True)
class Attach:
    """Asks for equal envs. The fields mean what they do in `lane.PoolConfig`."""

    env_name: str
    num_envs: int
    num_splits: int = 1
    #: Root seed in [0, 2**63).
    seed: int
    first_env_index: int = 0
    first_incarnation: int = 0
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[WrapperSpec, ...] = ()
    autoreset: Autoreset = "same_step"
    infos: Infos = "episode_end"
    spare_envs: bool = False

    @property
    def num_hosted(self) -> int:
        """How many envs the server has to host."""
        return 2 * self.num_envs if self.spare_envs else self.num_envs

    def encode(self) -> bytes:
        """Returns the body; raises CodecError if an argument cannot be sent."""
        fields = {**vars(self), "env_kwargs": dict(self.env_kwargs)}
        fields["wrappers"] = plain_wrappers(self.wrappers)
        for name in ("wrappers", "spare_envs", "first_incarnation"):
            if not fields[name]:  # as from a client that has not heard of it
                del fields[name]
        body = codec.encode(fields)
        if len(body) > MAX_ATTACH_BYTES:
            raise codec.CodecError(
                f"expected env_kwargs and wrappers that encode to less than "
                f"{MAX_ATTACH_BYTES} bytes; got {len(body)} with all else"
            )
        return body

    @classmethod
    def decode(cls, body: bytes) -> Attach:
        """Reads a body."""
        fields = Fields.decode(body, "ATTACH")
        return cls(
            env_name=fields.text("env_name", MAX_NAME_LENGTH),
            num_envs=fields.integer("num_envs", 1, _MAX_ENVS),
            num_splits=fields.integer("num_splits", 1, MAX_ENTRIES, default=1),
            seed=fields.integer("seed", 0, _MAX_SEED),
            first_env_index=fields.integer("first_env_index", 0, _U32, default=0),
            first_incarnation=fields.integer("first_incarnation", 0, _U32, default=0),
            env_kwargs=fields.mapping("env_kwargs"),
            wrappers=_read_wrappers(fields),
            autoreset=fields.choice("autoreset", get_args(Autoreset)),
            infos=fields.choice("infos", get_args(Infos)),
            spare_envs=fields.boolean("spare_envs", default=False),
        )


@dataclass(frozen=True, kw_only=True)
class Building:
    """Says that the envs asked for are still being built, for so many ms."""

    elapsed_ms: int

    def encode(self) -> bytes:
        """Returns the body."""
        return codec.encode(vars(self))

    @classmethod
    def decode(cls, body: bytes) -> Building:
        """Reads a body."""
        fields = Fields.decode(body, "BUILDING")
        return cls(elapsed_ms=fields.integer("elapsed_ms", 0, _MAX_SEED))


@dataclass(frozen=True, kw_only=True)
class Pong:
    """Answers a PING: for how many ms each busy block has been running."""

    running: Mapping[int, int]

    def encode(self) -> bytes:
        """Returns the body."""
        return codec.encode({"running": [list(pair) for pair in self.running.items()]})

    @classmethod
    def decode(cls, body: bytes) -> Pong:
        """Reads a body."""
        running: dict[int, int] = {}
        for pair in Fields.decode(body, "PONG").items("running", MAX_ENTRIES):
            if not _are_integers(pair, 2):
                raise RemoteProtocolError(
                    "PONG.running: expected pairs of block and ms"
                )
            running[pair[0]] = pair[1]
        return cls(running=running)


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Says that the server gives out no envs any more, and stops after so many ms.

    A lease ends earlier, once each of its rows has ended an episode.
    """

    grace_ms: int

    def encode(self) -> bytes:
        """Returns the body."""
        return codec.encode(vars(self))

    @classmethod
    def decode(cls, body: bytes) -> Drain:
        """Reads a body."""
        fields = Fields.decode(body, "DRAIN")
        return cls(grace_ms=fields.integer("grace_ms", 0, _MAX_SEED))


@dataclass(frozen=True, kw_only=True)
class ResetBody:
    """Which rows of each listed block to reset, and with which seeds.

    Attributes:
      resets: Per entry of the message, rows of the lease (None: all of the block) and
        a seed for each (None: the env's own choice).
    """

    resets: tuple[tuple[tuple[int, ...] | None, tuple[int, ...] | None], ...]

    def encode(self) -> bytes:
        """Returns the body."""
        return codec.encode(
            {"resets": [{"rows": rows, "seeds": seeds} for rows, seeds in self.resets]}
        )

    @classmethod
    def decode(cls, body: bytes) -> ResetBody:
        """Reads a body."""
        resets = []
        for item in Fields.decode(body, "RESET").items("resets", MAX_ENTRIES):
            fields = Fields(item, "RESET.resets")
            rows = (
                None
                if fields.anything("rows") is None
                else fields.integers("rows", _MAX_ENVS, _MAX_ENVS)
            )
            seeds = (
                None
                if fields.anything("seeds") is None
                else fields.integers("seeds", _MAX_ENVS, _MAX_SEED)
            )
            resets.append((rows, seeds))
        return cls(resets=tuple(resets))


@dataclass(frozen=True, kw_only=True)
class CallBody:
    """Attribute access on one env; the fields mean what they do in `lane.Call`."""

    env_index: int
    kind: CallKind
    name: str
    arguments: tuple[Any, ...]

    def encode(self) -> bytes:
        """Returns the body; raises CodecError for arguments that cannot be sent."""
        return codec.encode({**vars(self), "arguments": list(self.arguments)})

    @classmethod
    def decode(cls, body: bytes) -> CallBody:
        """Reads a body."""
        fields = Fields.decode(body, "CALL")
        return cls(
            env_index=fields.integer("env_index", 0, _MAX_ENVS),
            kind=fields.choice("kind", _CALL_KINDS),
            name=fields.text("name", MAX_NAME_LENGTH),
            arguments=tuple(fields.items("arguments", 64)),
        )


def _read_wrappers(fields: Fields) -> tuple[WrapperSpec, ...]:
    value = fields.anything("wrappers")
    try:
        return () if value is None else wrappers_from_plain(value)
    except WrapperError as error:
        raise RemoteProtocolError(f"ATTACH: {error}") from None


def _are_integers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(item) is int and 0 <= item <= _MAX_SEED for item in value)
    )
