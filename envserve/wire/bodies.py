"""The bodies of control messages, as typed and bounded structs.

`encode` gives the msgpack map that stands in frame 0. `decode` holds every field of one
to its type and bounds, passes over fields that are not known, and raises
RemoteProtocolError and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self, TypeVar

from msgspec import Meta, Raw

from envserve.errors import RemoteProtocolError, SpaceError
from envserve.lane import Block, Call, CallKind, RenderedFrame
from envserve.settings import EnvRequest, convert
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.text import Name, one_line
from envserve.wire.constants import (
    MAX_ATTACH_BYTES,
    MAX_ATTACH_VALUES,
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    MAX_CALL_VALUES,
    MAX_ENTRIES,
    MAX_FRAME_ROWS,
    MAX_OPTIONS_BYTES,
    MAX_OPTIONS_VALUES,
    MAX_TOLD_BLOCKS,
)
from envserve.wire.handshake import U32, U63, Body, Milliseconds, Row, Seconds, read
from envserve.wrappers.specs import plain_wrappers

__all__ = [
    "Attach",
    "Building",
    "CallBody",
    "Drain",
    "FrameRequest",
    "FrameResult",
    "Granted",
    "Pong",
    "ResetBody",
    "pack_options",
    "read_values",
]

Type = TypeVar("Type")

_BlockIndex = Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]
_Options = dict[str, Any]
_NIL: Final = Raw(b"\xc0")


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


def _within(body: bytes, what: str, max_bytes: int, max_values: int) -> bytes:
    """Returns what is encoded; raises CodecError for what would be refused."""
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


@dataclass(frozen=True, kw_only=True)
class Attach(EnvRequest):
    """Asks for envs."""

    def encode(self) -> bytes:
        """Returns the body; raises CodecError if an argument cannot be sent."""
        wrappers = plain_wrappers(self.wrappers)
        body = codec.encode({**vars(self), "wrappers": wrappers})
        what = "env_kwargs and wrappers"
        return _within(body, what, MAX_ATTACH_BYTES, MAX_ATTACH_VALUES)

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
    lease_seconds: Seconds
    env_name: Name
    observation_space: Raw
    action_space: Raw
    blocks: Annotated[
        tuple[tuple[U32, U32, U32, _BlockIndex], ...], Meta(max_length=MAX_ENTRIES)
    ]


class Pong(Body, frozen=True, kw_only=True):
    """Answers a PING: for how many ms each busy block has been running."""

    running: Annotated[Mapping[U32, Milliseconds], Meta(max_length=MAX_ENTRIES)]


class Drain(Body, frozen=True, kw_only=True):
    """Says that the server gives out no envs any more, and stops after so many ms.

    A lease ends earlier, once each of its rows has ended an episode.
    """

    grace_ms: Milliseconds


_Rows = Annotated[tuple[Row, ...], Meta(max_length=1 << 16)]
_Seeds = Annotated[tuple[U63 | None, ...], Meta(max_length=1 << 16)]


class ResetBody(Body, frozen=True, kw_only=True):
    """Which rows of each listed block to reset, and with which seeds.

    Attributes:
      resets: Per entry of the message, rows of the lease (None: all of the block) and
        a seed for each, or None; see `lane.Reset`.
      options: What each of their envs gets as well; see `pack_options`.
    """

    resets: Annotated[
        tuple[tuple[_Rows | None, _Seeds | None], ...], Meta(max_length=MAX_ENTRIES)
    ]
    options: Annotated[bytes, Meta(max_length=MAX_OPTIONS_BYTES)] = b""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body, whose options are left to who uses them."""
        found = super().decode(body)
        if found.options:
            read_values(found.options, _Options, "options", MAX_OPTIONS_VALUES)
        return found


def pack_options(options: Mapping[str, Any] | None) -> bytes:
    """Encodes what `reset(options=...)` is to give to envs; nothing for None.

    Raises:
      CodecError: They are no dict of plain values under names, or too much.
    """
    if options is None:
        return b""
    try:
        convert(options, _Options)
        body = codec.encode(options)
        return _within(body, "values", MAX_OPTIONS_BYTES, MAX_OPTIONS_VALUES)
    except ValueError as error:
        raise codec.CodecError(f"options: {error}") from None


class CallBody(Body, frozen=True, kw_only=True):
    """Attribute access on some envs; the fields mean what they do in `lane.Call`.

    Attributes:
      kind: What is done.
      name: To which attribute.
      calls: Per entry of the message, rows of the lease and their arguments, or nil
        for those of the entry before.
    """

    kind: CallKind
    name: Name
    calls: Annotated[
        tuple[tuple[_Rows, Raw], ...], Meta(min_length=1, max_length=MAX_TOLD_BLOCKS)
    ]

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """Puts calls that differ in rows and arguments into one body."""
        before, told = b"", []
        for call in calls:
            is_same = call.arguments == before
            told.append((call.env_indices, _NIL if is_same else Raw(call.arguments)))
            before = call.arguments
        return cls(kind=calls[0].kind, name=calls[0].name, calls=tuple(told))

    def encode(self) -> bytes:
        """Returns the body; raises CodecError for arguments that cannot be sent."""
        body = super().encode()
        return _within(body, "arguments", MAX_CALL_BYTES, MAX_CALL_VALUES)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body, whose arguments are left to who uses them."""
        try:
            codec.check(body, MAX_CALL_VALUES)
        except codec.CodecError as error:
            raise RemoteProtocolError(f"CallBody: {error}") from None
        return super().decode(body)


class FrameRequest(Body, frozen=True, kw_only=True):
    """FRAME: asks for pictures, and has workers make more of them for some seconds.

    Attributes:
      lease: Its number, as of `LeaseStatus`.
      rows: Rows of the lease.
      width: Pixels across, at most.
      after: For each row the serial of the picture that is known, or 0; may be short.
      record: Whether to give no pictures, but what the first of the rows went through.
    """

    lease: U63
    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_FRAME_ROWS)]
    width: Annotated[int, Meta(ge=8, le=1024)] = 160
    after: Annotated[tuple[U63, ...], Meta(max_length=MAX_FRAME_ROWS)] = ()
    record: bool = False


class FrameResult(Body, frozen=True, kw_only=True):
    """What there is, in the order of the request; none that is known, or not made yet.

    Attributes:
      pictures: As many as there is room for.
    """

    pictures: Annotated[tuple[RenderedFrame, ...], Meta(max_length=MAX_FRAME_ROWS)] = ()
