"""The bodies of control messages, as typed and bounded structs.

`encode` gives the msgpack map that stands in frame 0. `decode` holds every field of one
to its type and bounds, passes over fields that are not known, and raises
RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import force_setattr

from envserve import codec
from envserve.errors import RemoteProtocolError, SpaceError
from envserve.lane import Block
from envserve.settings import EnvRequest, Name, convert
from envserve.spec import EnvSpec, describe, restore
from envserve.text import one_line
from envserve.wire.constants import (
    MAX_ATTACH_BYTES,
    MAX_ATTACH_VALUES,
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    MAX_CALL_VALUES,
    MAX_ENTRIES,
    MAX_NAMES,
    MIN_VERSION,
    VERSION,
)

__all__ = [
    "Attach",
    "Body",
    "Building",
    "CallBody",
    "Drain",
    "Granted",
    "Hello",
    "Join",
    "Milliseconds",
    "Pong",
    "ResetBody",
    "Row",
    "Welcome",
    "read",
    "read_values",
]

Type = TypeVar("Type")

_Version = Annotated[int, Meta(ge=0, le=255)]
_U32 = Annotated[int, Meta(ge=0, lt=2**32)]
_U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_BlockIndex = Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]
_Seconds = Annotated[float, Meta(ge=0, lt=2.0**63)]
Milliseconds = _U63
#: One of a lease.
Row = Annotated[int, Meta(ge=0, lt=1 << 16)]

#: NumPy's integers go as integers.
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=operator.index)


def read(data: bytes | bytearray | memoryview, kind: type[Type], where: str) -> Type:
    """Decodes a value of some type, whose length has been checked.

    Raises:
      RemoteProtocolError: It is not of that type; names the place in it.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{where}: {one_line(str(error), 500)}") from None


def read_values(
    data: bytes | bytearray | memoryview,
    kind: type[Type],
    where: str,
    max_values: int | None = None,
) -> Type:
    """Decodes the same where it holds values of any kind, with the codec's limits."""
    try:
        value = codec.decode(data, max_bytes=len(data), max_values=max_values)
        return convert(value, kind)
    except ValueError as error:
        raise RemoteProtocolError(f"{where}: {one_line(str(error), 500)}") from None


def _write_values(
    fields: Mapping[str, Any], what: str, max_bytes: int, max_values: int
) -> bytes:
    """Encodes values of any kind; raises CodecError for what would be refused."""
    body = codec.encode(fields)
    if len(body) > max_bytes:
        raise codec.CodecError(
            f"expected {what} that encode to less than {max_bytes} bytes; got "
            f"{len(body)} with all else"
        )
    try:
        codec.check(body, max_values)
    except codec.CodecError as error:
        raise codec.CodecError(f"{what}: {error}; send many as one array") from None
    return body


class Body(Struct, frozen=True, kw_only=True):
    """What all bodies do."""

    def encode(self) -> bytes:
        """Returns the body."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body."""
        return read(body, cls, cls.__name__)


class Hello(Body, frozen=True, kw_only=True):
    """Opens a conversation.

    Attributes:
      min_version: Lowest protocol version that the client speaks.
      max_version: Highest.
      client: Who asks, for the server's log.
    """

    min_version: _Version = MIN_VERSION
    max_version: _Version = VERSION
    client: Name = ""


class Welcome(Body, frozen=True, kw_only=True):
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

    min_version: _Version = MIN_VERSION
    max_version: _Version = VERSION
    max_message_bytes: _U63
    lease_seconds: _Seconds
    env_names: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)]
    num_names: _U32
    total_envs: _U32
    free_envs: _U32
    is_starting: bool = False
    is_draining: bool = False
    loop_lag_ms: Milliseconds = 0

    def __post_init__(self) -> None:
        """Makes names fit to be shown."""
        force_setattr(self, "env_names", tuple(map(one_line, self.env_names)))


class Join(Body, frozen=True, kw_only=True):
    """Asks that a client's public key takes the place of its invitation's."""

    public: Annotated[bytes, Meta(min_length=32, max_length=32)]


@dataclass(frozen=True, kw_only=True)
class Attach(EnvRequest):
    """Asks for envs."""

    def encode(self) -> bytes:
        """Returns the body; raises CodecError if an argument cannot be sent."""
        wrappers = [[spec.name, spec.arguments] for spec in self.wrappers]
        fields = {**vars(self), "wrappers": wrappers}
        what = "env_kwargs and wrappers"
        return _write_values(fields, what, MAX_ATTACH_BYTES, MAX_ATTACH_VALUES)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body."""
        return read_values(body, cls, "Attach", MAX_ATTACH_VALUES)


class Building(Body, frozen=True, kw_only=True):
    """Says that the envs asked for are still being built, for so many ms."""

    elapsed_ms: Milliseconds


@dataclass(frozen=True, kw_only=True)
class Granted:
    """Grants a lease: enough to lay out its rows.

    Attributes:
      epoch: Number of the lease, which every request on it repeats.
      lease_seconds: Silence after which the server gives the envs up.
      spec: Spaces of every env.
      blocks: The blocks, which partition the rows.
    """

    epoch: int
    lease_seconds: float
    spec: EnvSpec
    blocks: tuple[Block, ...]

    def encode(self) -> bytes:
        """Returns the body; raises CodecError if the spaces are too large to send."""
        body = _Granted(
            epoch=self.epoch,
            lease_seconds=self.lease_seconds,
            env_name=self.spec.env_name,
            observation_space=Raw(codec.encode(describe(self.spec.observation_space))),
            action_space=Raw(codec.encode(describe(self.spec.action_space))),
            blocks=tuple((b.start, b.stop, b.worker, b.split) for b in self.blocks),
        ).encode()
        if len(body) > MAX_BODY_BYTES:
            raise codec.CodecError(
                f"expected spaces whose description fits into {MAX_BODY_BYTES} bytes; "
                f"got {len(body)}; give large Boxes one low and one high for all"
            )
        return body

    @classmethod
    def decode(cls, body: bytes, num_envs: int) -> Self:
        """Reads a body; its blocks must partition `num_envs` rows."""
        fields = read(body, _Granted, "Granted")
        try:
            observation_space, action_space = (
                restore(codec.decode(memoryview(space), max_bytes=MAX_BODY_BYTES))
                for space in (fields.observation_space, fields.action_space)
            )
        except (codec.CodecError, SpaceError) as error:
            text = one_line(str(error), 500)
            raise RemoteProtocolError(f"Granted: {text}") from None
        edges = [0, *(block[1] for block in fields.blocks)]
        if (
            edges[-1] != num_envs
            or edges[:-1] != [block[0] for block in fields.blocks]
            or any(start >= stop for start, stop, *_ in fields.blocks)
        ):
            raise RemoteProtocolError(
                f"Granted: blocks: expected [start, stop, worker, split] for each of "
                f"consecutive blocks over {num_envs} rows"
            )
        return cls(
            epoch=fields.epoch,
            lease_seconds=fields.lease_seconds,
            spec=EnvSpec(one_line(fields.env_name), observation_space, action_space),
            blocks=tuple(Block(i, *block) for i, block in enumerate(fields.blocks)),
        )


class _Granted(Body, frozen=True, kw_only=True):
    epoch: Annotated[int, Meta(ge=1, lt=2**32)]
    lease_seconds: _Seconds
    env_name: Name
    observation_space: Raw
    action_space: Raw
    blocks: Annotated[
        tuple[tuple[_U32, _U32, _U32, _BlockIndex], ...], Meta(max_length=MAX_ENTRIES)
    ]


class Pong(Body, frozen=True, kw_only=True):
    """Answers a PING: for how many ms each busy block has been running."""

    running: Annotated[Mapping[_U32, Milliseconds], Meta(max_length=MAX_ENTRIES)]


class Drain(Body, frozen=True, kw_only=True):
    """Says that the server gives out no envs any more, and stops after so many ms.

    A lease ends earlier, once each of its rows has ended an episode.
    """

    grace_ms: Milliseconds


_Rows = Annotated[tuple[Row, ...], Meta(max_length=1 << 16)]
_Seeds = Annotated[tuple[_U63, ...], Meta(max_length=1 << 16)]


class ResetBody(Body, frozen=True, kw_only=True):
    """Which rows of each listed block to reset, and with which seeds.

    Attributes:
      resets: Per entry of the message, rows of the lease (None: all of the block) and
        a seed for each (None: the env's own choice).
    """

    resets: Annotated[
        tuple[tuple[_Rows | None, _Seeds | None], ...], Meta(max_length=MAX_ENTRIES)
    ]


class CallBody(Body, frozen=True, kw_only=True):
    """Attribute access on one env; the fields mean what they do in `lane.Call`."""

    env_index: Row
    kind: Literal["call", "get", "set"]
    name: Name
    arguments: Annotated[tuple[Any, ...], Meta(max_length=64)]

    def encode(self) -> bytes:
        """Returns the body; raises CodecError for arguments that cannot be sent."""
        fields = msgspec.structs.asdict(self)
        return _write_values(fields, "arguments", MAX_CALL_BYTES, MAX_CALL_VALUES)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body."""
        return read_values(body, cls, "CallBody", MAX_CALL_VALUES)
